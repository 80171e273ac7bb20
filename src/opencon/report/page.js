"use strict";
// Names of files and classes are only ever set as text, never as markup. Photos are numbered by their place in `photos`.

const $ = (id) => document.getElementById(id);
const page = JSON.parse($("data").textContent);
const P = page.photos, N = P.file.length, S = page.num_seen;
const dark = matchMedia("(prefers-color-scheme: dark)");
const typed = {};  // class -> the name typed for it
let unsaved = false;

// What was typed outlives the page, where the browser lets it: under the discovery's own key.
const storage = "opencon names of " + page.names_for;
try { Object.assign(typed, JSON.parse(localStorage.getItem(storage))); } catch { /* not allowed, or not ours */ }
function keepTyped() {
  try { localStorage.setItem(storage, JSON.stringify(typed)); unsaved = false; } catch { unsaved = true; }
}

function el(tag, props, ...children) {
  const made = Object.assign(document.createElement(tag), props);
  made.append(...children);
  return made;
}
const number = (n) => n.toLocaleString("en-US");
const photos = (n) => n === 1 ? "1 photo" : `${number(n)} photos`;
const percent = (share) => Math.floor(100 * share + 1e-9) + "%";  // 99.6% is not yet 100%
const everyPhoto = () => P.file.map((_, i) => i);
const isLabeled = (i) => P.given[i] >= 0;
const isDoubtful = (i) => isLabeled(i) && P.given[i] !== P.predicted[i];
const isUnsure = (i) => P.doubt[i] === 1;
const isOdd = (i) => P.doubt[i] === 2;  // unlike everything
const shownAs = (i) => isLabeled(i) ? P.given[i] : P.predicted[i];
const guessed = (c) => page.guesses[c] && page.guesses[c].replace(/, \d+%$/, "");  // what group c looks like
const marked = (c) => page.guesses[c] ? `${page.classes[c]} (${guessed(c)}?)` : page.classes[c];
const nameOf = (c) => typed[c] ? `${typed[c]} (${page.classes[c]})` : marked(c);
const paletteNow = () => dark.matches ? page.dark_colors : page.colors;
const colorOf = (c) => paletteNow()[c % paletteNow().length];

// Round for a seen class. A new group has corners, and other ones each time that the colors begin again.
const OUTLINES = [
  [[0, -1.25], [1.15, 0.85], [-1.15, 0.85]],
  [[-0.95, -0.95], [0.95, -0.95], [0.95, 0.95], [-0.95, 0.95]],
  [[0, -1.3], [1.3, 0], [0, 1.3], [-1.3, 0]],
  [[0, 1.25], [1.15, -0.85], [-1.15, -0.85]],
];
const outlineOf = (c) => c < S ? null : OUTLINES[Math.floor(c / page.colors.length) % OUTLINES.length];

function swatch(c) {
  const make = (tag, attributes) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const key in attributes) made.setAttribute(key, attributes[key]);
    return made;
  };
  const svg = make("svg", { viewBox: "0 0 16 16", "aria-hidden": "true" });
  const corners = outlineOf(c);
  const at = ([x, y]) => `${8 + 5.6 * x} ${8 + 5.6 * y}`;
  svg.append(corners ? make("path", { d: `M${corners.map(at).join("L")}Z` }) : make("circle", { cx: 8, cy: 8, r: 6.5 }));
  const paint = () => svg.firstChild.setAttribute("fill", colorOf(c));
  dark.addEventListener("change", paint);
  paint();
  return svg;
}

function picture(i) {
  if (!page.pictures[i]) {
    return el("span", { className: "none" }, i in page.pictures ? "no picture" : "picture not in this page");
  }
  const alt = `${P.file[i]}: ${nameOf(shownAs(i))}, ${percent(P.confidence[i])} sure`;
  return el("img", { src: "data:image/jpeg;base64," + page.pictures[i], alt, decoding: "async", draggable: false });
}

// --- galleries -------------------------------------------------------------------------------------------------------

function tile(i, list) {
  const kind = isOdd(i) ? " odd" : isUnsure(i) ? " unsure" : "";
  const made = el("button", { type: "button", className: "photo" + kind, title: P.file[i] }, picture(i));
  const doubt = () => `${page.classes[P.given[i]]} → ${page.classes[P.predicted[i]]}`;
  made.append(el("small", {}, isDoubtful(i) ? doubt() : isLabeled(i) ? "your label" : percent(P.confidence[i])));
  made.onclick = () => openDialog(list, list.indexOf(i));
  return made;
}

function strip(title, list, className) {
  const tiles = el("div", { className: "tiles " + className }, ...list.map((i) => tile(i, list)));
  return el("div", { className: "strip" }, el("h4", {}, title), tiles);
}

function membersWithPicture(g) {  // surest first, then those that the user labeled
  const isInside = { outliers: isOdd, doubtful: isDoubtful }[g.kind] || ((i) => shownAs(i) === g.class && !isOdd(i));
  return everyPhoto().filter((i) => page.pictures[i] && isInside(i))
    .sort((a, b) => isLabeled(a) - isLabeled(b) || P.confidence[b] - P.confidence[a]);
}

const takers = new Map();  // class -> takes its guess as its name

// Groups with the same name become one, so the second group with a guess gets a number.
function unlikeOthers(c, name) {
  const isTaken = (own) => page.classes.includes(own) || Object.entries(typed).some(([k, v]) => +k !== c && v === own);
  let own = name;
  for (let n = 2; isTaken(own); n++) own = `${name} ${n}`;
  return own;
}

function headOf(g) {
  const found = g.kind === "new" ? photos(g.found) : g.found ? photos(g.found) + " found" : "none found";
  const labeled = g.labeled ? `, ${number(g.labeled)} labeled by you` : "";
  const head = el("div", { className: "head" }, swatch(g.class), el("h3", {}, el("bdi", {}, page.classes[g.class])));
  head.append(el("span", { className: "of" }, found + labeled));
  const guess = page.guesses[g.class];
  if (g.kind === "new" && page.can_name) {
    const hint = guess ? guessed(g.class) + "?" : "What is it?";
    const field = el("input", { type: "text", placeholder: hint, maxLength: 200, autocomplete: "off" });
    field.value = typed[g.class] || "";
    field.setAttribute("aria-label", "Name for " + page.classes[g.class]);
    field.oninput = () => { typed[g.class] = field.value.trim(); keepTyped(); showNames(); };
    if (guess) {
      const take = el("button", { type: "button", className: "guess", title: "Take the guess as its name" });
      take.append(el("bdi", {}, `looks like: ${guess} (a guess)`));
      takers.set(g.class, () => { field.value = unlikeOthers(g.class, guessed(g.class)); field.oninput(); });
      take.onclick = takers.get(g.class);
      head.append(take);
    }
    head.append(el("label", {}, el("span", {}, "Name"), field));
  } else if (g.kind === "new" && guess) {
    head.append(el("span", { className: "guess" }, el("bdi", {}, `looks like: ${guess} (a guess)`)));
  }
  return head;
}

function expander(g, brief, every) {
  const total = g.found + g.labeled;
  const most = every.length < total ? `Show ${number(every.length)} of the ${number(total)}` : `Show all ${number(total)}`;
  const order = "From most to least sure" + (g.found && g.labeled ? ", then those you labeled" : "");
  const full = el("div", { hidden: true });
  const more = el("button", { type: "button", className: "button more" }, most);
  more.setAttribute("aria-expanded", "false");
  more.onclick = () => {
    const isOpen = full.hidden;
    if (!full.firstChild) full.append(strip(order, every, "all"));
    full.hidden = !isOpen;
    brief.hidden = isOpen;
    more.setAttribute("aria-expanded", String(isOpen));
    more.textContent = isOpen ? "Show fewer" : most;
  };
  return [full, more];
}

function card(g) {
  const made = el("article", { className: "card" }, ...(g.class < 0 ? [] : [headOf(g)]));
  const first = g.class < 0 ? "Surest choice" : g.found ? "Most typical" : "Labeled by you";
  const brief = el("div", { className: "strips" }, strip(first, g.typical, "many"));
  if (g.unsure.length) brief.append(strip("Least sure", g.unsure, "few"));
  made.append(brief);
  const every = membersWithPicture(g);
  if (every.length > g.typical.length + g.unsure.length) made.append(...expander(g, brief, every));
  return made;
}

for (const g of page.galleries) {
  $(g.kind).hidden = false;
  $(g.kind).append(card(g));
}
for (const id of ["doubtful", "outliers", "seen", "new"]) {
  const title = $(id).querySelector("h2").textContent;
  if (!$(id).hidden) $("parts").prepend(el("li", {}, el("a", { href: "#" + id }, title)));
}

// --- names -----------------------------------------------------------------------------------------------------------

const groups = page.galleries.filter((g) => g.kind === "new").map((g) => g.class);

$("naming").hidden = !page.can_name;
$("guess").hidden = !takers.size;
$("guess").onclick = () => { for (const [c, take] of takers) if (!typed[c]) take(); };

function showNames() {
  const count = groups.filter((c) => typed[c]).length;
  $("named").textContent = `${count} of ${groups.length} ${groups.length === 1 ? "group" : "groups"} named`;
  $("save").disabled = count === 0;
  for (const entry of document.querySelectorAll("#legend [data-class]")) {
    entry.querySelector("bdi").textContent = nameOf(Number(entry.dataset.class));
  }
  redraw();
}
$("save").onclick = () => {
  const quoted = (text) => '"' + text.replaceAll('"', '""') + '"';
  const lineOf = (c) => [page.classes[c], typed[c], page.names_for].map(quoted).join(",") + "\n";
  const lines = groups.filter((c) => typed[c]).map(lineOf);
  const url = URL.createObjectURL(new Blob(["group,name,discovery\n", ...lines], { type: "text/csv" }));
  el("a", { href: url, download: "names.csv" }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
  unsaved = false;
};
addEventListener("beforeunload", (event) => { if (unsaved && !$("save").disabled) event.preventDefault(); });

// --- one photo -------------------------------------------------------------------------------------------------------

let opened = [], at = 0;

function factsOf(i) {
  const facts = isLabeled(i) ? [["Your label", page.classes[P.given[i]]]] : [];
  const how = isLabeled(i) ? "Looks like" : isOdd(i) ? "Nearest" : "Put into";
  facts.push([how, nameOf(P.predicted[i])], ["Sure", percent(P.confidence[i])]);
  const threshold = page.threshold === null ? "" : `, threshold ${Number(page.threshold.toPrecision(3))}`;
  facts.push(["Novelty", P.novelty[i] + threshold]);
  if (P.twin_of[i]) facts.push(["Nearly the same as", P.twin_of[i]]);
  if (isOdd(i) || isUnsure(i)) facts.push(["Note", isOdd(i) ? "unlike everything" : "uncertain"]);
  return facts;
}
function openDialog(list, index) {
  opened = list;
  at = (index + list.length) % list.length;
  const rows = [["File", P.file[list[at]]], ...factsOf(list[at])];
  $("big").replaceChildren(picture(list[at]));
  $("about").replaceChildren(...rows.flatMap(([key, value]) => [el("dt", {}, key), el("dd", {}, el("bdi", {}, value))]));
  $("before").disabled = $("after").disabled = list.length < 2;
  if (!$("dialog").open) $("dialog").showModal();
}
$("before").onclick = () => openDialog(opened, at - 1);
$("after").onclick = () => openDialog(opened, at + 1);
$("dialog").onclick = (event) => { if (event.target === $("dialog")) $("dialog").close(); };
$("dialog").onkeydown = (event) => {
  const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (way) openDialog(opened, at + way);
};

// --- map -------------------------------------------------------------------------------------------------------------

const canvas = $("canvas"), pen = canvas.getContext("2d"), tip = $("tip");
const off = new Set();  // classes that the legend hides
const radius = Math.min(6, Math.max(2.2, 115 / Math.sqrt(N))), margin = 26;
const home = { zoom: 1, x: page.size[0] / 2, y: page.size[1] / 2 }, view = { ...home };
let W = 1, H = 1;  // of the canvas, in CSS pixels
let here = -1, visited = -1, lit = -1, drag = null, frame = 0;

const unit = () => {
  const wide = (W - 2 * margin) / Math.max(page.size[0], 1), high = (H - 2 * margin) / Math.max(page.size[1], 1);
  return view.zoom * Math.min(wide, high);
};
const place = (i) => [W / 2 + (P.x[i] - view.x) * unit(), H / 2 - (P.y[i] - view.y) * unit()];
const onMap = () => everyPhoto().filter((i) => !off.has(shownAs(i)));

function mark(i, r) {
  const [x, y] = place(i), c = shownAs(i);
  if (x < -9 || y < -9 || x > W + 9 || y > H + 9) return;
  pen.beginPath();
  if (isOdd(i)) {
    pen.moveTo(x - r, y - r); pen.lineTo(x + r, y + r);
    pen.moveTo(x - r, y + r); pen.lineTo(x + r, y - r);
  } else if (c < S) {
    pen.arc(x, y, r, 0, 7);
  } else {
    for (const [dx, dy] of outlineOf(c)) pen.lineTo(x + dx * r, y + dy * r);
    pen.closePath();
  }
  pen.fillStyle = pen.strokeStyle = colorOf(c);
  pen.lineWidth = isOdd(i) ? 2 : 1.4;
  if (!isOdd(i) && !isUnsure(i)) {
    pen.fill();
    pen.lineWidth = 0.6;
    pen.strokeStyle = dark.matches ? "#0008" : "#0006";  // pale colors need an edge
  }
  pen.stroke();
}
const middles = new Map();  // class -> where its name stands: in the middle of its photos, above nine in ten of them
for (const g of page.galleries.filter((of) => of.class >= 0).sort((a, b) => b.found + b.labeled - a.found - a.labeled)) {
  const own = everyPhoto().filter((i) => shownAs(i) === g.class && !isOdd(i));
  if (!own.length) continue;
  const at = (values, share) => values.sort((a, b) => a - b)[Math.floor(share * (values.length - 1))];
  middles.set(g.class, [at(own.map((i) => P.x[i]), 0.5), at(own.map((i) => P.y[i]), 0.9)]);
}

function writeNames() {  // of the largest first; one that would cover another, or stand outside, is left out
  const taken = [], style = getComputedStyle(canvas);
  pen.font = "600 12.5px " + style.fontFamily;
  pen.textAlign = "center";
  pen.textBaseline = "middle";
  pen.lineJoin = "round";
  for (const [c, [right, up]] of middles) {
    if (off.has(c) || (lit >= 0 && lit !== c)) continue;
    const whole = typed[c] || (page.guesses[c] ? marked(c) : page.classes[c]);
    const text = whole.length > 26 ? whole.slice(0, 25) + "…" : whole;
    const wide = pen.measureText(text).width / 2 + 4, high = 9;
    const x = W / 2 + (right - view.x) * unit(), y = H / 2 - (up - view.y) * unit() - radius - high;
    const clashes = ([a, b, w]) => Math.abs(a - x) < w + wide && Math.abs(b - y) < 2 * high;
    if (x < wide || y < high || x > W - wide || y > H - high || taken.some(clashes)) continue;
    taken.push([x, y, wide]);
    pen.strokeStyle = style.getPropertyValue("--card");
    pen.lineWidth = 4;
    pen.strokeText(text, x, y);
    pen.fillStyle = style.getPropertyValue("--ink");
    pen.fillText(text, x, y);
  }
}

function draw() {
  frame = 0;
  pen.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
  pen.clearRect(0, 0, W, H);
  for (const i of onMap()) {
    pen.globalAlpha = lit < 0 ? 0.88 : shownAs(i) === lit ? 1 : 0.1;
    mark(i, radius);
  }
  pen.globalAlpha = 1;
  writeNames();
  if (here < 0) return;
  mark(here, radius + 2);
  pen.beginPath();
  pen.arc(...place(here), radius + 6, 0, 7);
  pen.lineWidth = 2;
  pen.strokeStyle = getComputedStyle(canvas).color;
  pen.stroke();
}
const redraw = () => { frame = frame || requestAnimationFrame(draw); };

function show(i) {  // the photo beside its mark; -1 for none
  if (i === here && i >= 0) return;
  here = i;
  tip.hidden = i < 0;
  redraw();
  if (i < 0) return;
  visited = i;
  tip.replaceChildren(picture(i), el("b", {}, el("bdi", {}, nameOf(shownAs(i)))), el("bdi", {}, P.file[i]));
  for (const [key, value] of factsOf(i)) {
    if (key !== "Put into" && key !== "Your label") tip.append(el("div", { className: "soft" }, `${key}: ${value}`));
  }
  const [x, y] = place(i), wide = tip.offsetWidth, high = tip.offsetHeight;
  const left = x + 18 + wide < W ? x + 18 : x - 18 - wide;
  tip.style.left = Math.max(0, Math.min(W - wide, left)) + "px";
  tip.style.top = Math.max(0, Math.min(H - high, y - high / 2)) + "px";
}
function nearest(event, reach) {
  const area = canvas.getBoundingClientRect();
  let best = -1, least = reach;
  for (const i of onMap()) {
    const [x, y] = place(i), apart = Math.hypot(area.left + x - event.clientX, area.top + y - event.clientY);
    if (apart < least) [best, least] = [i, apart];
  }
  return best;
}
function zoom(factor) {
  view.zoom = Math.min(40, Math.max(1, view.zoom * factor));
  if (view.zoom === 1) Object.assign(view, home);
  canvas.style.touchAction = view.zoom > 1 ? "none" : "pan-y";
  $("farther").disabled = view.zoom === 1;
  show(-1);
}
canvas.onpointerdown = (event) => { drag = { x: event.clientX, y: event.clientY, moved: false }; };
canvas.onpointermove = (event) => {
  const far = drag ? Math.hypot(event.clientX - drag.x, event.clientY - drag.y) : 0;
  if (drag && view.zoom > 1 && (drag.moved || far > 4)) {
    if (!drag.moved) canvas.setPointerCapture(event.pointerId);
    view.x -= (event.clientX - drag.x) / unit();
    view.y += (event.clientY - drag.y) / unit();
    drag = { x: event.clientX, y: event.clientY, moved: true };
    show(-1);
  } else if (event.pointerType !== "touch") {
    show(nearest(event, 16));
  }
};
canvas.onpointerup = (event) => {
  const hasMoved = drag && drag.moved, hit = nearest(event, event.pointerType === "touch" ? 28 : 16);
  drag = null;
  if (hasMoved) return;
  show(hit);
  if (hit >= 0 && event.pointerType === "mouse") openDialog([hit], 0);
};
canvas.onpointercancel = () => { drag = null; };
canvas.onpointerleave = (event) => { if (event.pointerType !== "touch") { drag = null; show(-1); } };
canvas.onblur = () => show(-1);
canvas.onwheel = (event) => {  // with the control key, which is also what pinching on a touchpad sends
  if (!event.ctrlKey) return;
  event.preventDefault();
  zoom(Math.exp(-event.deltaY / 100));
};
canvas.onkeydown = (event) => {
  const way = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  if (event.key === "Enter" && here >= 0) openDialog([here], 0);
  if (event.key === "Escape") show(-1);
  const walk = onMap().sort((a, b) => shownAs(a) - shownAs(b) || a - b);
  if (!way || !walk.length) return;
  event.preventDefault();
  const next = walk[(Math.max(walk.indexOf(visited), way > 0 ? -1 : 0) + way + walk.length) % walk.length];
  if (view.zoom > 1) [view.x, view.y] = [P.x[next], P.y[next]];  // it may lie outside of what is in view
  show(next);
};
$("closer").onclick = () => zoom(1.6);
$("farther").onclick = () => zoom(1 / 1.6);

// --- legend ----------------------------------------------------------------------------------------------------------

const entries = new Map();  // class -> its button

function showLegend() {
  for (const [c, entry] of entries) entry.setAttribute("aria-pressed", String(!off.has(c)));
  show(-1);
}
function entryOf(g) {
  const c = g.class, name = el("span", {}, el("bdi", {}, nameOf(c))), count = el("small", {}, number(g.found + g.labeled));
  const entry = el("button", { type: "button", className: "entry" }, swatch(c), name, count);
  entry.dataset.class = c;
  entry.onclick = () => { if (!off.delete(c)) off.add(c); showLegend(); };
  entry.onmouseenter = entry.onfocus = () => { lit = c; redraw(); };
  entry.onmouseleave = entry.onblur = () => { lit = -1; redraw(); };
  entries.set(c, entry);
  return entry;
}
const allOn = el("button", { type: "button", className: "button" }, "Show all");
const allOff = el("button", { type: "button", className: "button" }, "Hide all");
allOn.onclick = () => { off.clear(); showLegend(); };
allOff.onclick = () => { for (const c of entries.keys()) off.add(c); showLegend(); };
$("legend").append(el("div", { className: "both" }, allOn, allOff));
for (const [kind, title] of [["new", "New groups"], ["seen", "What you know"]]) {
  const inside = page.galleries.filter((g) => g.kind === kind);
  if (inside.length) $("legend").append(el("h3", {}, title), ...inside.map(entryOf));
}
showLegend();
showNames();
zoom(1);
dark.addEventListener("change", redraw);
function resize() {
  [W, H] = [canvas.clientWidth, canvas.clientHeight];
  canvas.width = W * devicePixelRatio;
  canvas.height = H * devicePixelRatio;
  show(-1);
  draw();
}
resize();  // the observer speaks only with the next frame: until then the map would have the size of a point
new ResizeObserver(resize).observe(canvas);
