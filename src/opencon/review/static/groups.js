// The list on the left: piles to look at, classes with a name, and new groups.

import { byId, el, number } from "./dom.js";
import { JUNK, STRANGERS, isFinished, on, orderedGroups, picture, store } from "./store.js";

let choose = () => {}, view = null;
const covers = new Map(); // group to the photo that stands for it

export function startGroups(chosen) {
  choose = chosen;
  on("change", drawGroups);
  byId("groups").addEventListener("keydown", keys);
}

export function setView(next) {
  view = next;
  drawGroups();
}

// The surest photo of each group; looked up again when it has left.
function findCovers() {
  const best = new Map();
  for (let i = 0; i < store.photos; i++) {
    const g = store.place[i], now = best.get(g);
    if (now === undefined || store.confidence[i] > store.confidence[now]) best.set(g, i);
  }
  for (const [g, photo] of best) if (!covers.has(g) || store.place[covers.get(g)] !== g) covers.set(g, photo);
}

export function twins() {
  const found = [];
  for (let i = 0; i < store.photos; i++) if (store.twin_of[i] >= 0) found.push(i);
  return found;
}

export function drawGroups() {
  findCovers();
  const [named, others] = orderedGroups();
  const size = (g) => store.sizes.get(g) ?? 0;
  const left = store.photos - store.numLooked;
  const piles = [
    { key: "unsure", name: "Unsure first", count: left, note: "not yet looked at, least certain first" },
    { key: "strangers", name: "Unlike everything", count: size(STRANGERS), note: "they fit no group" },
    { key: "twins", name: "Near-duplicates", count: twins().length, note: "nearly the same photo twice" },
    { key: "junk", name: "Junk", count: size(JUNK), note: "left out of everything" },
    { key: "unreadable", name: "Cannot be read", count: store.numUnreadable, note: "damaged or other files" },
  ].filter((pile) => pile.count || pile.key === "unsure");
  const nodes = [
    heading("Look at"),
    ...piles.map((pile) => row({
      isOn: view?.kind === pile.key, name: pile.name, count: pile.count, title: pile.note, go: () => choose({ kind: pile.key }),
      picture: pile.key === "strangers" || pile.key === "junk" ? covers.get(pile.key === "junk" ? JUNK : STRANGERS) : undefined, symbol: SYMBOLS[pile.key],
    })),
    named.length ? heading("Named") : null,
    ...named.map(groupRow),
    others.length ? heading(`New groups without a name`) : null,
    ...others.map(groupRow),
  ];
  const box = byId("groups"), held = document.activeElement?.dataset?.key, scroll = box.scrollTop;
  box.replaceChildren(...nodes.filter(Boolean));
  box.scrollTop = scroll;
  if (held && box.contains(document.activeElement) === false) box.querySelector(`[data-key="${CSS.escape(held)}"]`)?.focus();
}

const SYMBOLS = { unsure: "?", strangers: "✳", twins: "⧉", junk: "✕", unreadable: "!" };

function heading(text) {
  return el("h2", { text });
}

function groupRow(group) {
  const all = store.sizes.get(group.id) ?? 0, seen = store.seen.get(group.id) ?? 0;
  return row({
    isOn: view?.kind === "group" && view.id === group.id, name: group.name, count: all, seen,
    picture: covers.get(group.id), done: all > 0 && isFinished(group.id), isNew: !group.isNamed,
    title: `${number(all, "photo")}, ${seen} looked at`, go: () => choose({ kind: "group", id: group.id }),
  });
}

function row({ isOn, name, count, seen = 0, picture: photo, symbol = "", done = false, isNew = false, title, go }) {
  const cover = photo === undefined ? el("span", { class: "cover symbol", "aria-hidden": "true", text: symbol })
    : el("img", { class: "cover", alt: "", src: picture(photo), loading: "lazy" });
  const button = el(
    "button", { class: `group${isOn ? " on" : ""}${isNew ? " new" : ""}`, title, "aria-current": isOn ? "true" : null, onclick: go },
    cover, el("span", { class: "name", text: name }),
    el("span", { class: "count", text: count.toLocaleString("en") }),
    done ? el("span", { class: "done", text: "✓", role: "img", "aria-label": "all looked at" }) : el("span", { class: "done", "aria-hidden": "true" }),
  );
  button.dataset.key = name;
  if (seen && !done) {
    const line = el("span", { class: "share", "aria-hidden": "true" });
    line.style.width = `${(100 * seen) / count}%`;
    button.append(line);
  }
  return button;
}

function keys(event) {
  if (event.key !== "ArrowDown" && event.key !== "ArrowUp") return;
  const rows = [...byId("groups").querySelectorAll("button")], at = rows.indexOf(document.activeElement);
  rows[Math.min(rows.length - 1, Math.max(0, at + (event.key === "ArrowDown" ? 1 : -1)))]?.focus();
  event.preventDefault();
  event.stopPropagation();
}

// The next group with something left to look at, after this one; null: all is done.
export function nextGroup(after = null) {
  const [named, others] = orderedGroups();
  const all = [...others, ...named].map((g) => g.id).filter((g) => !isFinished(g));
  if (!all.length) return null;
  const order = [...others, ...named].map((g) => g.id), start = order.indexOf(after);
  return order.slice(start + 1).find((g) => !isFinished(g) && g !== after) ?? all.find((g) => g !== after) ?? null;
}
