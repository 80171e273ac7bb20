// The map: every photo a point, drawn straight into pixels, so that a hundred thousand stay fluid on any machine.

import { byId } from "./dom.js";
import { on, picture, placeName, shortName, store } from "./store.js";
import { onSelect, selected } from "./grid.js";

// Colors that people with any color vision tell apart (Okabe and Ito), and two more.
const HUES = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8a6fc9", "#a09b20"];
const NEAR = 12; // pixels within which a point counts as pointed at
const GLIDE = 700; // milliseconds from the rough map to the better one

let plane, over, frame, pixels, ink, width = 0, height = 0, ratio = 1;
let zoom = 1, offsetX = 0, offsetY = 0, drawing = null, mode = "lasso", current = null, pending = false;
let from = null, began = 0, colors = {}, onChosen = () => {}, onPick = () => {};
export const timing = { frames: 0, milliseconds: 0 };

export function startMap({ chosen, pick }) {
  onChosen = chosen;
  onPick = pick;
  plane = byId("map");
  over = byId("drawn");
  new ResizeObserver(resize).observe(byId("mapbox"));
  on("map", () => { glide(); drawMap(); });
  on("change", drawMap);
  onSelect(drawMap);
  plane.addEventListener("pointerdown", press);
  plane.addEventListener("pointermove", hover);
  plane.addEventListener("pointerleave", () => { byId("hover").hidden = true; });
  plane.addEventListener("wheel", wheel, { passive: false });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readColors(); drawMap(); });
  byId("lasso").onclick = () => setMode("lasso");
  byId("pan").onclick = () => setMode("pan");
  byId("fit").onclick = () => { zoom = 1; offsetX = offsetY = 0; drawMap(); };
  readColors();
}

function setMode(next) {
  mode = next;
  byId("lasso").setAttribute("aria-pressed", mode === "lasso");
  byId("pan").setAttribute("aria-pressed", mode === "pan");
  plane.style.cursor = mode === "lasso" ? "crosshair" : "grab";
}

// The photos of the view stand out; null: all do.
export function setCurrent(photos) {
  current = null;
  if (photos) {
    current = new Uint8Array(store.photos);
    for (const photo of photos) current[photo] = 1;
  }
  drawMap();
}

function readColors() {
  const style = getComputedStyle(document.documentElement);
  const one = (name) => style.getPropertyValue(name).trim();
  colors = { faint: packed(one("--map-faint")), selected: packed(one("--map-selected")), hues: HUES.map(packed), ink: one("--ink") };
}

function packed(hex) {
  const value = parseInt(hex.slice(1), 16);
  return (255 << 24) | ((value & 255) << 16) | (((value >> 8) & 255) << 8) | ((value >> 16) & 255);
}

function resize() {
  ratio = Math.min(devicePixelRatio || 1, 2);
  const box = byId("mapbox");
  width = Math.max(1, Math.round(box.clientWidth * ratio));
  height = Math.max(1, Math.round(box.clientHeight * ratio));
  for (const canvas of [plane, over]) { canvas.width = width; canvas.height = height; }
  frame = plane.getContext("2d").createImageData(width, height);
  pixels = new Uint32Array(frame.data.buffer);
  drawMap();
}

export function drawMap() {
  if (pending) return;
  pending = true;
  requestAnimationFrame(() => { pending = false; paint(); });
}

// Where a photo is, in pixels of the canvas.
function scale() {
  return 0.94 * Math.min(width, height) * zoom;
}

function position(photo, size, time) {
  let x = store.map[2 * photo], y = store.map[2 * photo + 1];
  if (from && time < 1) {
    const share = time * time * (3 - 2 * time);
    x = from[2 * photo] + share * (x - from[2 * photo]);
    y = from[2 * photo + 1] + share * (y - from[2 * photo + 1]);
  }
  return [(x - 0.5) * size + width / 2 + offsetX, (y - 0.5) * size + height / 2 + offsetY];
}

let shownMap = null;

function glide() {
  const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
  from = !still && shownMap && shownMap.length === store.map.length ? shownMap : null;
  shownMap = store.map;
  began = performance.now();
}

function paint() {
  if (!store.map || !frame) return;
  const start = performance.now();
  const size = scale(), time = from ? Math.min(1, (start - began) / GLIDE) : 1;
  pixels.fill(0);
  const radius = store.photos > 20000 ? 1 : store.photos > 3000 ? 1.5 * ratio : 2.2 * ratio;
  const { place, photos } = store, { faint, hues } = colors, disk = diskOf(radius);
  const chosen = new Uint8Array(photos);
  for (const i of selected) chosen[i] = 1;
  // Three passes, so that what matters lies on top: the rest, the view, the selection.
  if (current !== null) for (let i = 0; i < photos; i++) if (!current[i] && !chosen[i]) dot(i, size, time, disk, faint);
  for (let i = 0; i < photos; i++) {
    if (!chosen[i] && (current === null || current[i])) dot(i, size, time, disk, place[i] < 0 ? faint : hues[place[i] % hues.length]);
  }
  const large = diskOf(radius + 1.5 * ratio);
  for (const i of selected) dot(i, size, time, large, colors.selected);
  plane.getContext("2d").putImageData(frame, 0, 0);
  timing.frames++;
  timing.milliseconds += performance.now() - start;
  if (time < 1) drawMap();
  else from = null;
}

// The pixels of a disk as steps from its middle, in the buffer and in both directions.
function diskOf(radius) {
  const r = Math.ceil(radius), limit = radius * radius + 0.25, steps = [], xs = [], ys = [];
  for (let dy = -r; dy <= r; dy++) for (let dx = -r; dx <= r; dx++) {
    if (dx * dx + dy * dy <= limit) { steps.push(dy * width + dx); xs.push(dx); ys.push(dy); }
  }
  return { r, steps, xs, ys };
}

function dot(photo, size, time, disk, color) {
  let x, y;
  if (time < 1) [x, y] = position(photo, size, time);
  else {
    x = (store.map[2 * photo] - 0.5) * size + width / 2 + offsetX;
    y = (store.map[2 * photo + 1] - 0.5) * size + height / 2 + offsetY;
  }
  const { r, steps, xs, ys } = disk, left = Math.round(x), top = Math.round(y), middle = top * width + left;
  if (left < -r || top < -r || left >= width + r || top >= height + r) return;
  if (left >= r && top >= r && left < width - r && top < height - r) {
    for (let k = 0; k < steps.length; k++) pixels[middle + steps[k]] = color;
    return;
  }
  for (let k = 0; k < steps.length; k++) {
    const column = left + xs[k], row = top + ys[k];
    if (column >= 0 && row >= 0 && column < width && row < height) pixels[middle + steps[k]] = color;
  }
}

// --- hands -------------------------------------------------------------------------------------------------------------

function spot(event) {
  const box = plane.getBoundingClientRect();
  return [(event.clientX - box.left) * ratio, (event.clientY - box.top) * ratio];
}

function nearest([x, y]) {
  const size = scale();
  let best = -1, least = (NEAR * ratio) ** 2;
  for (let i = 0; i < store.photos; i++) {
    const dx = (store.map[2 * i] - 0.5) * size + width / 2 + offsetX - x;
    const dy = (store.map[2 * i + 1] - 0.5) * size + height / 2 + offsetY - y;
    const d = dx * dx + dy * dy;
    if (d < least) { least = d; best = i; }
  }
  return best;
}

function press(event) {
  if (!store.map) return;
  event.preventDefault();
  plane.setPointerCapture(event.pointerId);
  byId("hover").hidden = true;
  const moving = mode === "pan" || event.button === 1 || event.altKey;
  const start = spot(event), origin = [offsetX, offsetY], add = event.shiftKey || event.ctrlKey || event.metaKey;
  drawing = [start];
  let far = false;
  const move = (next) => {
    const now = spot(next);
    if (!far && Math.hypot(now[0] - start[0], now[1] - start[1]) < 5 * ratio) return;
    far = true;
    if (moving) {
      offsetX = origin[0] + now[0] - start[0];
      offsetY = origin[1] + now[1] - start[1];
      return drawMap();
    }
    drawing.push(now);
    outline();
  };
  const end = () => {
    plane.removeEventListener("pointermove", move);
    plane.removeEventListener("pointerup", end);
    plane.removeEventListener("pointercancel", end);
    const line = drawing;
    drawing = null;
    outline();
    if (!far) {
      const photo = nearest(start);
      if (photo >= 0) onPick(photo, add);
      return;
    }
    if (!moving) onChosen(inside(line), add);
  };
  plane.addEventListener("pointermove", move);
  plane.addEventListener("pointerup", end);
  plane.addEventListener("pointercancel", end);
}

function outline() {
  const context = over.getContext("2d");
  context.clearRect(0, 0, width, height);
  if (!drawing || drawing.length < 2) return;
  context.beginPath();
  drawing.forEach(([x, y], at) => (at ? context.lineTo(x, y) : context.moveTo(x, y)));
  context.closePath();
  context.lineWidth = 2 * ratio;
  context.strokeStyle = colors.ink;
  context.setLineDash([6 * ratio, 4 * ratio]);
  context.stroke();
  context.globalAlpha = 0.08;
  context.fillStyle = colors.ink;
  context.fill();
  context.globalAlpha = 1;
}

// The photos within a closed line: a point is inside where a ray from it crosses the line an odd number of times.
export function inside(line) {
  const size = scale(), found = [];
  let [left, top, right, bottom] = [Infinity, Infinity, -Infinity, -Infinity];
  for (const [x, y] of line) { left = Math.min(left, x); right = Math.max(right, x); top = Math.min(top, y); bottom = Math.max(bottom, y); }
  for (let i = 0; i < store.photos; i++) {
    const x = (store.map[2 * i] - 0.5) * size + width / 2 + offsetX;
    const y = (store.map[2 * i + 1] - 0.5) * size + height / 2 + offsetY;
    if (x < left || x > right || y < top || y > bottom) continue;
    let odd = false;
    for (let a = 0, b = line.length - 1; a < line.length; b = a++) {
      const [ax, ay] = line[a], [bx, by] = line[b];
      if (ay > y !== by > y && x < ((bx - ax) * (y - ay)) / (by - ay) + ax) odd = !odd;
    }
    if (odd) found.push(i);
  }
  return found;
}

function wheel(event) {
  event.preventDefault();
  zoomAt(spot(event), Math.exp(-event.deltaY * 0.0015));
}

export function zoomAt([x, y], factor) {
  const before = zoom;
  zoom = Math.min(60, Math.max(0.5, zoom * factor));
  const real = zoom / before;
  offsetX = x - width / 2 - (x - width / 2 - offsetX) * real;
  offsetY = y - height / 2 - (y - height / 2 - offsetY) * real;
  drawMap();
}

function hover(event) {
  if (drawing || !store.map || event.pointerType === "touch") return;
  const photo = nearest(spot(event)), tip = byId("hover");
  tip.hidden = photo < 0;
  if (photo < 0) return;
  const [image, words] = tip.children;
  const address = picture(photo);
  if (image.getAttribute("src") !== address) image.src = address;
  words.textContent = `${placeName(store.place[photo])} · ${shortName(photo)}`;
  const box = plane.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
  tip.style.transform = `translate(${Math.min(Math.max(x - 66, 4), box.width - 140)}px, ${y > 190 ? y - 178 : y + 18}px)`;
}

// For a measurement: turn and zoom for some frames, and say how many a second there were.
export async function spin(frames) {
  const start = performance.now();
  for (let k = 0; k < frames; k++) {
    zoom = 1 + 0.5 * Math.sin(k / 10);
    offsetX = 40 * Math.sin(k / 7);
    await new Promise((resolve) => requestAnimationFrame(resolve));
    paint();
  }
  const seconds = (performance.now() - start) / 1000;
  zoom = 1;
  offsetX = offsetY = 0;
  drawMap();
  return frames / seconds;
}

