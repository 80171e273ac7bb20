// The photos of a view as tiles. Only the tiles on the screen exist, so fifty thousand scroll like fifty.

import { byId, el, speak, number } from "./dom.js";
import { on, picture, placeName, shortName, store } from "./store.js";

const GAP = 8, AHEAD = 2; // pixels between tiles, rows beyond the screen
const HOLD = 450; // milliseconds that a finger rests to open a photo

export const selected = new Set();
let photos = [], focus = 0, anchor = 0, side = 132, columns = 1, showPlace = false;
let box, canvas, band, openPhoto = () => {};
const tiles = new Map(); // photo to element
const changed = []; // told of a new selection

export const onSelect = (listener) => changed.push(listener);

export function startGrid(open) {
  openPhoto = open;
  box = byId("grid");
  canvas = el("div", { class: "sheet" });
  band = el("div", { class: "band", hidden: true });
  canvas.append(band);
  box.append(canvas);
  box.addEventListener("scroll", () => requestAnimationFrame(draw), { passive: true });
  new ResizeObserver(() => layout()).observe(box);
  box.addEventListener("pointerdown", press);
  box.addEventListener("dblclick", (event) => { const at = tileAt(event); if (at !== null) openPhoto(photos, at); });
  box.addEventListener("focus", () => draw());
  on("files", () => { for (const [photo, tile] of tiles) label(tile, photo); });
}

// Show these photos. The selection stays where it still makes sense.
export function show(list, { keepFocus = false, places = false } = {}) {
  const before = photos[focus];
  photos = list;
  showPlace = places;
  const inside = new Set(photos);
  if (!keepFocus) { focus = 0; anchor = 0; box.scrollTop = 0; }
  else {
    const at = photos.indexOf(before);
    focus = at >= 0 ? at : Math.min(focus, Math.max(photos.length - 1, 0));
    anchor = Math.min(anchor, Math.max(photos.length - 1, 0));
  }
  let gone = false;
  for (const photo of selected) if (!inside.has(photo) && !keepOutside) { selected.delete(photo); gone = true; }
  for (const [photo, tile] of tiles) if (!inside.has(photo)) { tile.remove(); tiles.delete(photo); }
  layout();
  if (gone) tell();
}

let keepOutside = false; // while a lasso selects photos that the view does not show

export function shown() { return photos; }
export function focused() { return photos.length ? photos[focus] : null; }

export function setSide(pixels) {
  side = pixels;
  layout();
  reveal();
}

function layout() {
  const width = box.clientWidth - 2 * GAP;
  columns = Math.max(1, Math.floor((width + GAP) / (side + GAP)));
  const rows = Math.ceil(photos.length / columns);
  canvas.style.height = `${Math.max(rows * (tall() + GAP) + GAP, 0)}px`;
  draw();
}

const wide = () => Math.floor((box.clientWidth - 2 * GAP - (columns - 1) * GAP) / columns);
const tall = () => Math.min(wide(), side * 1.35);
const spot = (at) => [GAP + (at % columns) * (wide() + GAP), GAP + Math.floor(at / columns) * (tall() + GAP)];

function draw() {
  const pitch = tall() + GAP;
  const first = Math.max(0, (Math.floor(box.scrollTop / pitch) - AHEAD) * columns);
  const last = Math.min(photos.length, (Math.ceil((box.scrollTop + box.clientHeight) / pitch) + AHEAD) * columns);
  const wanted = new Set(photos.slice(first, last));
  for (const [photo, tile] of tiles) if (!wanted.has(photo)) { tile.firstChild.removeAttribute("src"); tile.remove(); tiles.delete(photo); }
  const [w, h] = [wide(), tall()];
  for (let at = first; at < last; at++) {
    const photo = photos[at];
    let tile = tiles.get(photo);
    if (!tile) {
      tile = make(photo);
      tiles.set(photo, tile);
      canvas.append(tile);
    }
    const [x, y] = spot(at);
    tile.style.transform = `translate(${x}px, ${y}px)`;
    tile.style.width = `${w}px`;
    tile.style.height = `${h}px`;
    tile.setAttribute("aria-posinset", at + 1);
    tile.setAttribute("aria-setsize", photos.length);
    mark(tile, photo, at);
  }
  const own = tiles.get(photos[focus]);
  if (own) box.setAttribute("aria-activedescendant", own.id);
  else box.removeAttribute("aria-activedescendant");
}

function make(photo) {
  const image = el("img", { alt: "", decoding: "async", draggable: "false" });
  image.onerror = () => tile.classList.add("broken");
  image.src = picture(photo);
  const tile = el("div", { class: "tile", role: "option", id: `photo-${photo}` }, image,
    el("span", { class: "mark", "aria-hidden": "true" }), el("span", { class: "where" }));
  tile.dataset.photo = photo;
  label(tile, photo);
  return tile;
}

function label(tile, photo) {
  tile.setAttribute("aria-label", shortName(photo));
  tile.title = shortName(photo);
}

function mark(tile, photo, at) {
  const isSelected = selected.has(photo);
  tile.classList.toggle("selected", isSelected);
  tile.classList.toggle("looked", store.looked[photo] === 1);
  tile.classList.toggle("focus", at === focus);
  tile.setAttribute("aria-selected", isSelected);
  tile.lastChild.textContent = showPlace ? placeName(store.place[photo]) : "";
}

export function redraw() { draw(); }

function tell() {
  for (const listener of changed) listener();
}

// --- selecting ---------------------------------------------------------------------------------------------------------

export function select(list, { add = false, outside = false } = {}) {
  if (!add) selected.clear();
  keepOutside = outside;
  for (const photo of list) selected.add(photo);
  draw();
  tell();
}

export function clearSelection() {
  keepOutside = false;
  selected.clear();
  draw();
  tell();
}

export function selectAll() { select(photos); speak(`All ${number(photos.length, "photo")} selected`); }

function toggle(at) {
  const photo = photos[at];
  if (selected.has(photo)) selected.delete(photo);
  else selected.add(photo);
  focus = anchor = at;
  draw();
  tell();
}

function range(to, add) {
  const [low, high] = [Math.min(anchor, to), Math.max(anchor, to)];
  focus = to;
  select(photos.slice(low, high + 1), { add });
}

function tileAt(event) {
  const tile = event.target.closest?.(".tile");
  if (!tile) return null;
  const at = photos.indexOf(Number(tile.dataset.photo));
  return at < 0 ? null : at;
}

function press(event) {
  if (event.button !== 0) return;
  const at = tileAt(event), start = point(event), touch = event.pointerType === "touch";
  const before = event.ctrlKey || event.metaKey ? new Set(selected) : new Set();
  let dragged = false, timer = 0;
  if (touch && at !== null) timer = setTimeout(() => { timer = -1; openPhoto(photos, at); }, HOLD);

  const move = (next) => {
    if (touch) { if (distance(start, point(next)) > 10) { clearTimeout(timer); timer = -1; } return; }
    const now = point(next);
    if (!dragged && distance(start, now) < 6) return;
    dragged = true;
    scrollNear(next);
    banded(start, now, before);
  };
  const end = () => {
    removeEventListener("pointermove", move);
    removeEventListener("pointerup", end);
    removeEventListener("pointercancel", cancel);
    clearTimeout(timer);
    band.hidden = true;
    if (dragged || timer === -1) return;
    if (at === null) return clearSelection();
    if (event.shiftKey) return range(at, event.ctrlKey || event.metaKey);
    if (touch || event.ctrlKey || event.metaKey) return toggle(at);
    focus = anchor = at;
    select([photos[at]]);
  };
  const cancel = () => { dragged = true; end(); };
  addEventListener("pointermove", move);
  addEventListener("pointerup", end);
  addEventListener("pointercancel", cancel);
}

function point(event) {
  const frame = canvas.getBoundingClientRect();
  return [event.clientX - frame.left, event.clientY - frame.top];
}

const distance = ([a, b], [c, d]) => Math.hypot(a - c, b - d);

function scrollNear(event) {
  const frame = box.getBoundingClientRect();
  if (event.clientY > frame.bottom - 30) box.scrollTop += 24;
  if (event.clientY < frame.top + 30) box.scrollTop -= 24;
}

// A rubber band: every tile that it touches.
function banded(from, to, before) {
  const [left, right] = [Math.min(from[0], to[0]), Math.max(from[0], to[0])];
  const [top, bottom] = [Math.min(from[1], to[1]), Math.max(from[1], to[1])];
  band.hidden = false;
  Object.assign(band.style, { transform: `translate(${left}px, ${top}px)`, width: `${right - left}px`, height: `${bottom - top}px` });
  const [w, h] = [wide(), tall()], inside = [...before];
  const firstRow = Math.max(0, Math.floor((top - GAP) / (h + GAP))), lastRow = Math.floor((bottom - GAP) / (h + GAP));
  for (let at = firstRow * columns; at < Math.min(photos.length, (lastRow + 1) * columns); at++) {
    const [x, y] = spot(at);
    if (x < right && x + w > left && y < bottom && y + h > top) { inside.push(photos[at]); anchor = focus = at; }
  }
  select(inside);
}

// --- keys --------------------------------------------------------------------------------------------------------------

function reveal() {
  if (!photos.length) return;
  const [, y] = spot(focus);
  if (y < box.scrollTop) box.scrollTop = y - GAP;
  else if (y + tall() > box.scrollTop + box.clientHeight) box.scrollTop = y + tall() + GAP - box.clientHeight;
}

export function focusOn(photo) {
  const at = photos.indexOf(photo);
  if (at < 0) return;
  focus = anchor = at;
  reveal();
  draw();
}

// Arrow keys and the like. Returns whether the key was for the grid.
export function gridKey(event) {
  if (!photos.length) return false;
  const page = columns * Math.max(1, Math.floor(box.clientHeight / (tall() + GAP)));
  const steps = {
    ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns, PageUp: -page, PageDown: page,
    Home: -photos.length, End: photos.length,
  };
  if (event.key in steps) {
    const to = Math.min(photos.length - 1, Math.max(0, focus + steps[event.key]));
    if (event.shiftKey) range(to, false);
    else { focus = anchor = to; draw(); }
    reveal();
    draw();
    const photo = photos[focus];
    speak(`${shortName(photo)}, ${focus + 1} of ${photos.length}${selected.has(photo) ? ", selected" : ""}${store.looked[photo] ? ", looked at" : ""}`);
    return true;
  }
  if (event.key === "x") { toggle(focus); speak(`${shortName(photos[focus])}${selected.has(photos[focus]) ? "" : " not"} selected`); return true; }
  if (event.key === "Enter") { openPhoto(photos, focus); return true; }
  return false;
}
