// The page: which photos are shown, what the keys do, and the bars around the grid.

import { byId, el, isTyping, number, speak, toast } from "./dom.js";
import { JUNK, STRANGERS, ask, decide, load, membersOf, on, orderedGroups, placeName, redo, refresh, remember, store, targets, undo } from "./store.js";
import { clearSelection, focusOn, focused, gridKey, onSelect, redraw, select, selectAll, selected, setSide, show, shown, startGrid } from "./grid.js";
import { drawMap, inside, setCurrent, spin, startMap, timing, zoomAt } from "./map.js";
import { drawGroups, nextGroup, setView, startGroups, twins } from "./groups.js";
import { allGroups, chooser } from "./chooser.js";
import { openLarge } from "./large.js";
import { better, openMerges } from "./merges.js";
import { openSplit } from "./split.js";
import { openLearn } from "./learn.js";
import { openTake } from "./take.js";
import { openHelp } from "./help.js";

const SIDES = [84, 108, 132, 168, 220, 300];
const ORDERS = { unsure: "Unsure first", alike: "Alike together", typical: "Typical first", name: "File name" };
let view = { kind: "group", id: 0 }, order = "unsure", sizeAt = 2;

// --- which photos --------------------------------------------------------------------------------------------------------

function ordered(photos) {
  const list = [...photos], c = store.confidence;
  if (order === "unsure") list.sort((a, b) => store.looked[a] - store.looked[b] || c[a] - c[b]);
  else if (order === "typical") list.sort((a, b) => c[b] - c[a]);
  else if (order === "alike") list.sort((a, b) => (line.get(a) ?? -1) - (line.get(b) ?? -1));
  else if (store.files) list.sort((a, b) => store.files[a].localeCompare(store.files[b], "en", { numeric: true }));
  return list;
}

let line = new Map(); // photo to its turn, where similar ones stand together

// The server knows who is like whom: ask, then show.
async function standTogether() {
  if (order !== "alike" || view.kind !== "group") return;
  const group = view.id;
  try {
    const photos = await ask(`/api/alike/${group}`);
    if (order !== "alike" || view.kind !== "group" || view.id !== group) return;
    line = new Map(photos.map((photo, at) => [photo, at]));
    show(photosOf(view));
  } catch (err) { toast(err.message, { bad: true }); }
}

function photosOf(v) {
  if (v.kind === "group") return ordered(membersOf(v.id));
  if (v.kind === "strangers") return ordered(membersOf(STRANGERS));
  if (v.kind === "junk") return ordered(membersOf(JUNK));
  if (v.kind === "twins") return twins().flatMap((i) => [store.twin_of[i], i]).filter((p, at, all) => all.indexOf(p) === at);
  if (v.kind === "unsure") {
    const left = [];
    for (let i = 0; i < store.photos; i++) if (!store.looked[i] && store.place[i] !== JUNK) left.push(i);
    return left.sort((a, b) => store.confidence[a] - store.confidence[b]);
  }
  if (v.kind === "list") return v.photos.filter((p) => !v.from || store.place[p] !== v.from || !store.looked[p]);
  return [];
}

function open(next, { keepFocus = false } = {}) {
  view = next;
  document.body.classList.remove("drawer");
  byId("drawer").setAttribute("aria-expanded", "false");
  setView(view);
  const photos = photosOf(view);
  show(photos, { keepFocus, places: view.kind !== "group" && view.kind !== "junk" && view.kind !== "strangers" });
  setCurrent(view.kind === "unsure" ? null : photos);
  drawHead();
  standTogether();
  if (!keepFocus) speak(`${viewName()}, ${number(photos.length, "photo")}`);
}

function viewName() {
  const names = { unsure: "Unsure first", strangers: "Unlike everything", twins: "Near-duplicates", junk: "Junk", unreadable: "Cannot be read" };
  return view.kind === "group" ? placeName(view.id) : view.kind === "list" ? view.title : names[view.kind];
}

// --- the line above the photos -------------------------------------------------------------------------------------------

const HINTS = {
  unsure: "Everything that nobody has looked at, least certain first. Put it right here, or group by group.",
  strangers: "These resemble no group. Send them to a class, make groups of them, or throw them out.",
  twins: "Each stands beside the photo that it nearly repeats. Send the spare ones to Junk if you like.",
  junk: "Left out of learning and of what you take with you. Send a photo to a class to bring it back.",
  unreadable: "These files could not be opened as photos; nothing was done with them.",
};

function drawHead() {
  const photos = shown(), head = byId("head");
  if (document.activeElement?.closest?.("#head .chooser")) { headCount(); return; }
  const parts = [];
  if (view.kind === "group") {
    const group = store.groups.get(view.id);
    if (!group) return open({ kind: "unsure" });
    parts.push(nameField(group), el("p", { class: "soft", id: "headcount" }));
    if (group.suggested.length && !group.isNamed) parts.push(el("div", { class: "chips" }, el("span", { class: "soft", text: "Perhaps" }), group.suggested.slice(0, 4).map((word) => el("button", { class: "chip", text: word, onclick: () => rename(group.id, word) }))));
  } else {
    parts.push(el("h2", { text: viewName() }), el("p", { class: "soft", id: "headcount" }));
  }
  const tools = el("div", { class: "headtools" });
  if (view.kind === "group") {
    tools.append(
      el("button", { class: "main", id: "good", title: "G", onclick: allGood }, "All good, next"),
      el("button", { class: "plain", id: "split", title: "S", text: "Split …", disabled: photos.length < 2, onclick: () => openSplit(view.id, () => open(view)) }),
      mergeButton(), el("button", { class: "plain", title: "B", text: "Bring in more", onclick: bringMore }));
  }
  if (view.kind === "list" && view.back) tools.append(el("button", { class: "plain", text: `Back to ${placeName(view.back)}`, onclick: () => open({ kind: "group", id: view.back }) }));
  if (["group", "strangers", "junk"].includes(view.kind)) {
    const orders = el("select", { "aria-label": "Order of the photos", onchange: (event) => { order = event.target.value; open(view); } },
      Object.entries(ORDERS).map(([value, text]) => el("option", { value, text })));
    orders.value = order;
    tools.append(orders);
  }
  tools.append(el("div", { class: "seg", role: "group", "aria-label": "Size of the pictures" },
    el("button", { class: "plain", "aria-label": "Smaller pictures", text: "−", onclick: () => resize(-1) }),
    el("button", { class: "plain", "aria-label": "Larger pictures", text: "+", onclick: () => resize(1) })));
  parts.push(tools);
  if (HINTS[view.kind] || view.hint) parts.push(el("p", { class: "hint", text: view.hint ?? HINTS[view.kind] }));
  if (view.kind === "unreadable") parts.push(el("ul", { class: "unread" }, store.unreadable.map(([file, why]) => el("li", {}, el("b", { text: file }), ` ${why}`))));
  else if (!photos.length) parts.push(el("p", { class: "hint", text: view.kind === "unsure" ? "Everything has been looked at. Well done. Take it with you?" : "Nothing is here." }));
  head.replaceChildren(...parts);
  headCount();
}

function headCount() {
  const photos = shown(), seen = photos.reduce((sum, p) => sum + store.looked[p], 0);
  const words = view.kind === "group" ? `${number(photos.length, "photo")}, ${seen} looked at` : number(photos.length, "photo");
  if (byId("headcount")) byId("headcount").textContent = words;
}

function nameField(group) {
  const field = chooser({
    label: "Name of this group", placeholder: "Name this group", value: group.isNamed ? group.name : "",
    options: () => [...group.suggested.map((name) => ({ id: null, name, note: "suggested" })), ...allGroups().filter((o) => o.id !== group.id).map((o) => ({ ...o, note: `merge with these ${o.note}` }))],
    fresh: (text) => `Call it “${text}”`,
    pick: (id, text) => (id === null ? rename(group.id, text) : merge(group.id, id)),
    escape: () => { field.input.value = group.isNamed ? group.name : ""; byId("grid").focus(); },
  });
  field.input.id = "groupname";
  field.box.classList.add("title");
  if (!group.isNamed) field.input.placeholder = `Name this group (${group.name})`;
  return field.box;
}

async function rename(group, text) {
  const same = [...store.groups.values()].find((g) => g.name === text && g.id !== group);
  if (same) return merge(group, same.id);
  byId("grid").focus();
  if (await decide({ do: "name", group, name: text }, `Named “${text}”.`)) { remember(group); drawAll(); }
}

async function merge(a, b) {
  byId("grid").focus();
  const into = better(a, b), names = [placeName(a), placeName(b)];
  if (await decide({ do: "merge", groups: [a, b], into }, `Merged “${names[0]}” and “${names[1]}”.`)) open({ kind: "group", id: into });
}

function mergeButton() {
  const holder = el("div", { class: "inline" });
  const button = el("button", { class: "plain", id: "merge", text: "Merge with …", onclick: () => {
    const field = chooser({ label: "Merge this group with", placeholder: "Which group?", fresh: null, options: () => allGroups().filter((o) => o.id !== view.id), pick: (id) => id !== null && merge(view.id, id), escape: drawHead });
    holder.replaceChildren(field.box);
    field.input.focus();
    field.input.addEventListener("blur", () => setTimeout(() => holder.replaceChildren(button), 150));
  } });
  holder.append(button);
  return holder;
}

async function allGood() {
  if (view.kind !== "group") return;
  const group = view.id, left = shown().filter((p) => !store.looked[p]);
  if (left.length && !(await decide({ do: "confirm", photos: left }, `${number(left.length, "photo")} of “${placeName(group)}” looked at.`))) return;
  const next = nextGroup(group);
  if (next === null) { open({ kind: "unsure" }); toast("Every group has been looked at."); }
  else open({ kind: "group", id: next });
  byId("grid").focus();
}

function step(by) {
  const [named, others] = orderedGroups(), all = [...named, ...others].map((g) => g.id);
  const at = view.kind === "group" ? all.indexOf(view.id) : by > 0 ? -1 : all.length;
  const to = all[(at + by + all.length) % all.length];
  if (to !== undefined) open({ kind: "group", id: to });
}

async function bringMore() {
  if (view.kind !== "group") return;
  const group = view.id;
  try {
    const photos = await ask(`/api/more/${group}`);
    remember(group);
    open({ kind: "list", title: `More for ${placeName(group)}?`, photos, from: group, back: group, target: group, hint: `Photos elsewhere that might belong here, the likeliest first. Select those that do, and send them with 1 or “${placeName(group)}”.` });
  } catch (err) { toast(err.message, { bad: true }); }
}

async function findSimilar(photo) {
  if (photo === null) return;
  try {
    const photos = await ask(`/api/similar/${photo}`);
    open({ kind: "list", title: "Similar photos", photos: [photo, ...photos], back: store.place[photo] >= 0 ? store.place[photo] : null, hint: "The most similar photos of all groups, the nearest first." });
  } catch (err) { toast(err.message, { bad: true }); }
}

let searchTimer = 0;
function search(words) {
  clearTimeout(searchTimer);
  searchTimer = setTimeout(async () => {
    if (!words.trim()) return open({ kind: "unsure" });
    const found = await ask(`/api/search?q=${encodeURIComponent(words)}`).catch(() => null);
    if (found) open({ kind: "list", title: `“${words.trim()}”`, photos: found.photos, hint: `${number(found.number, "file name")} ${found.number === 1 ? "holds" : "hold"} this.` });
  }, 150);
}

function resize(by) {
  sizeAt = Math.min(SIDES.length - 1, Math.max(0, sizeAt + by));
  setSide(SIDES[sizeAt]);
}

// --- the line below: where to send what is selected ------------------------------------------------------------------------

let target = null;

function drawSend() {
  const bar = byId("sendbar"), count = selected.size;
  bar.classList.toggle("active", count > 0);
  if (!count) {
    target = null;
    bar.replaceChildren(el("span", { class: "soft", text: "Click photos to select them; drag, Shift or Ctrl selects many." }), el("span", { class: "soft wideonly" }, el("kbd", { text: "?" }), " all keys"));
    return;
  }
  if (target && document.activeElement === target.input) { byId("selcount").textContent = `${number(count, "photo")} selected`; return; }
  target = chooser({
    label: "Send the selected photos to a class", placeholder: "Send to a class, or a new name  ( C )", pick: (id, text) => send([...selected], id, text),
    escape: () => byId("grid").focus(),
  });
  target.input.id = "sendto";
  bar.replaceChildren(
    el("b", { id: "selcount", text: `${number(count, "photo")} selected` }), target.box, sendTools(),
    el("div", { class: "chips line" }, targets().map((g, k) => el("button", { class: "chip", onclick: () => send([...selected], g) }, el("kbd", { text: k + 1 }), el("span", { text: store.groups.get(g).name })))));
}

function sendTools() {
  return el("div", { class: "row" },
    el("button", { class: "plain", id: "newgroup", text: "New group", onclick: () => send([...selected], null, "") }),
    el("button", { class: "plain", id: "keep", text: "Right here", title: "These belong where they are", onclick: () => confirmSelected() }),
    el("button", { class: "plain", id: "junkit", title: "Space", text: "Junk", onclick: () => send([...selected], JUNK) }),
    el("button", { class: "plain", text: "Clear", title: "Esc", onclick: clearSelection }));
}

async function confirmSelected() {
  const photos = [...selected];
  if (await decide({ do: "confirm", photos }, `${number(photos.length, "photo")} looked at.`)) clearSelection();
}

// Send photos to a class by its number, or to a new one by its name. Resolves to whether it happened.
async function send(photos, to, name = null) {
  if (!photos.length) { toast("Select some photos first."); return false; }
  const known = to === null && name ? [...store.groups.values()].find((g) => g.name === name) : null;
  const place = known ? known.id : to;
  const words = place === null ? `${number(photos.length, "photo")}: a new group${name ? ` “${name}”` : ""}.` : `${number(photos.length, "photo")} to “${placeName(place)}”.`;
  const ids = new Set(store.groups.keys());
  const done = await decide(place === null ? { do: "new", photos, name } : { do: "move", photos, to: place }, words);
  if (!done) return false;
  const made = place === null ? [...store.groups.keys()].find((g) => !ids.has(g)) : place;
  if (made >= 0) remember(made);
  for (const photo of photos) selected.delete(photo);
  byId("grid").focus();
  drawAll();
  drawSend();
  return true;
}

// --- everything ------------------------------------------------------------------------------------------------------------

function drawAll() {
  if (view.kind === "group" && !store.groups.has(view.id)) return open({ kind: "unsure" });
  const photos = photosOf(view);
  show(photos, { keepFocus: true, places: view.kind !== "group" && view.kind !== "junk" && view.kind !== "strangers" });
  setCurrent(view.kind === "unsure" ? null : photos);
  drawHead();
  drawSend();
}

function drawTop() {
  byId("bar").value = store.photos ? store.numLooked / store.photos : 0;
  byId("looked").textContent = `${store.numLooked.toLocaleString("en")} of ${number(store.photos, "photo")} looked at`;
  byId("undo").disabled = !store.canUndo;
  byId("redo").disabled = !store.canRedo;
  byId("maplegend").textContent = "Colors are groups; the photos in view stand out, selected ones are marked. Wheel: zoom.";
}

function toggleMap() {
  const off = document.body.classList.toggle("nomap");
  byId("showmap").setAttribute("aria-pressed", String(!off));
  if (!off) drawMap();
}

function keys(event) {
  if (isTyping(event.target) || byId("dialog").open || event.altKey) return;
  const combined = event.ctrlKey || event.metaKey, onButton = event.target.tagName === "BUTTON" || event.target.tagName === "A";
  if (combined) {
    if (event.key === "a") { event.preventDefault(); selectAll(); }
    else if (event.key === "z") { event.preventDefault(); event.shiftKey ? redo() : undo(); }
    else if (event.key === "y") { event.preventDefault(); redo(); }
    return;
  }
  if (onButton && (event.key === "Enter" || event.key === " ")) return;
  const digit = Number(event.key);
  const chosen = () => (selected.size ? [...selected] : focused() === null ? [] : [focused()]);
  const actions = {
    " ": () => send(chosen(), JUNK), Backspace: undo, y: redo, Escape: clearSelection, "?": openHelp, "/": () => byId("search").focus(),
    c: () => { if (!selected.size && focused() !== null) select([focused()]); target?.input.focus(); },
    f: () => findSimilar(focused()), g: allGood, n: () => byId("groupname")?.focus(), s: () => view.kind === "group" && openSplit(view.id, () => open(view)),
    b: bringMore, q: openMerges, l: openLearn, t: openTake, m: toggleMap, "[": () => step(-1), "]": () => step(1), "+": () => resize(1), "=": () => resize(1), "-": () => resize(-1),
  };
  if (digit >= 1 && digit <= 9) { const to = targets()[digit - 1]; if (to !== undefined) send(chosen(), to); }
  else if (event.key in actions) actions[event.key]();
  else if (!gridKey(event)) return;
  event.preventDefault();
}

async function start() {
  startGrid((photos, at) => openLarge(photos, at, { send, findSimilar }));
  startGroups((next) => { open(next); byId("grid").focus(); });
  startMap({
    chosen: (photos, add) => {
      if (!photos.length) return clearSelection();
      if (!photos.every((p) => shown().includes(p))) open({ kind: "list", title: "From the map", photos, hint: "What you drew around on the map." });
      select(photos, { add });
      speak(`${number(photos.length, "photo")} selected on the map`);
    },
    pick: (photo, add) => {
      if (!shown().includes(photo)) open(store.place[photo] >= 0 ? { kind: "group", id: store.place[photo] } : { kind: store.place[photo] === JUNK ? "junk" : "strangers" });
      select([photo], { add });
      focusOn(photo);
    },
  });
  onSelect(drawSend);
  on("change", () => { drawTop(); if (shown().length || view) drawAll(); });
  on("files", () => { if (order === "name") drawAll(); });
  on("link", (isUp) => document.body.classList.toggle("offline", !isUp));
  on("learn", () => byId("learn").classList.toggle("busy", store.learn.is === "running"));
  byId("undo").onclick = undo;
  byId("redo").onclick = redo;
  byId("same").onclick = openMerges;
  byId("learn").onclick = openLearn;
  byId("take").onclick = openTake;
  byId("help").onclick = openHelp;
  byId("showmap").onclick = toggleMap;
  byId("search").oninput = (event) => search(event.target.value);
  byId("search").onkeydown = (event) => { if (event.key === "Escape") { event.target.value = ""; byId("grid").focus(); } };
  byId("drawer").onclick = () => byId("drawer").setAttribute("aria-expanded", String(document.body.classList.toggle("drawer")));
  addEventListener("keydown", keys);
  if (matchMedia("(max-width: 1100px)").matches) toggleMap();
  try {
    await load();
  } catch (err) {
    byId("head").replaceChildren(el("h2", { text: "The page could not begin" }), el("p", { text: err.message }));
    return;
  }
  byId("title").textContent = store.title;
  document.title = `${store.title} · opencon review`;
  drawTop();
  const first = nextGroup();
  open(first === null ? { kind: "unsure" } : { kind: "group", id: first });
  drawSend();
  byId("grid").focus();
  document.body.classList.add("ready");
  window.opencon = { store, refresh, spin, timing, inside, zoomAt, redraw, drawGroups }; // for measurements
}

start();
