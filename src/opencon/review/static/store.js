// What the page knows: every photo's place as arrays, the groups, and how to change them. The server decides; this follows.

import { toast } from "./dom.js";

export const JUNK = -1, STRANGERS = -2;
const KINDS = {
  place: Int32Array, looked: Uint8Array, given: Uint8Array, confidence: Float32Array, twin_of: Int32Array, map: Float32Array,
};

export const store = {
  run: "", title: "", folder: "", version: 0, photos: 0, unreadable: [], canUndo: 0, canRedo: 0, canLearn: false,
  groups: new Map(), place: null, looked: null, given: null, confidence: null, twin_of: null, map: null,
  files: null, sizes: new Map(), seen: new Map(), numLooked: 0, mapKind: "rough", learn: { is: "idle" },
};

const listeners = new Map(); // event to functions

export function on(event, listener) {
  listeners.set(event, [...(listeners.get(event) ?? []), listener]);
}

export function emit(event, data) {
  for (const listener of listeners.get(event) ?? []) listener(data);
}

export class Refused extends Error {}

export async function ask(path, body = undefined) {
  const options = body === undefined ? {} : {
    method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body),
  };
  let answer;
  try {
    answer = await fetch(path, { ...options, credentials: "same-origin", cache: "no-store" });
  } catch {
    throw new Refused("The program does not answer. Was it stopped? Nothing that was shown as done is lost.");
  }
  if (answer.ok) return answer.json();
  const text = await answer.text();
  let message = text.trim();
  try { message = JSON.parse(text).error ?? message; } catch { /* one line of plain text */ }
  throw new Refused(message || `The program refused (${answer.status}).`);
}

async function column(name) {
  const answer = await fetch(`/api/column/${name}`, { cache: "no-store" });
  if (!answer.ok) throw new Refused(await answer.text());
  if (name === "map") store.mapKind = answer.headers.get("x-map");
  return [new KINDS[name](await answer.arrayBuffer()), Number(answer.headers.get("x-version"))];
}

export async function load() {
  const facts = await ask("/api");
  Object.assign(store, {
    run: facts.run, title: facts.title, folder: facts.folder, photos: facts.photos,
    unreadable: facts.unreadable, numUnreadable: facts.numUnreadable, canLearn: facts.canLearn,
  });
  const names = ["place", "looked", "confidence", "twin_of"];
  const columns = await Promise.all(names.map(column));
  names.forEach((name, i) => { store[name] = columns[i][0]; });
  follow({ ...facts, photos: [] });
  if (columns.some(([, version]) => version !== facts.version)) await refresh();
  listen();
  setTimeout(() => { // the first photos come before their names and the map
    column("map").then(([map]) => { store.map = map; emit("map"); });
    ask("/api/files").then((files) => { store.files = files; emit("files"); });
  }, 150);
}

// Take over what an answer says has changed.
function follow(facts) {
  store.version = facts.version;
  store.canUndo = facts.canUndo;
  store.canRedo = facts.canRedo;
  store.groups = new Map(facts.groups.map((group) => [group.id, group]));
  (facts.photos ?? []).forEach((photo, at) => {
    store.place[photo] = facts.place[at];
    store.looked[photo] = facts.looked[at];
    store.confidence[photo] = facts.confidence[at];
  });
  count();
  emit("change", facts.photos ?? null);
}

function count() {
  const sizes = new Map(), seen = new Map();
  let looked = 0;
  for (let i = 0; i < store.photos; i++) {
    const g = store.place[i];
    sizes.set(g, (sizes.get(g) ?? 0) + 1);
    if (store.looked[i]) { seen.set(g, (seen.get(g) ?? 0) + 1); looked++; }
  }
  store.sizes = sizes;
  store.seen = seen;
  store.numLooked = looked;
}

async function take(facts) {
  if (facts.version < store.version) return; // an answer that was overtaken
  if (!facts.all) return follow(facts);
  const names = ["place", "looked", "confidence"];
  const columns = await Promise.all(names.map(column));
  names.forEach((name, i) => { store[name] = columns[i][0]; });
  follow({ ...facts, photos: [], version: Math.max(facts.version, ...columns.map(([, version]) => version)) });
}

export async function refresh() {
  await take(await ask(`/api/changes?since=${store.version}`));
}

// Decide something. Resolves to true once it is on the disk; a refusal is shown and resolves to false.
export async function decide(entry, words = null) {
  try {
    await take(await ask("/api/do", { ...entry, since: store.version }));
  } catch (err) {
    toast(err.message, { bad: true });
    return false;
  }
  if (words) toast(words, { action: "Undo", run: () => undo() });
  return true;
}

export async function undo() {
  if (store.canUndo) await decide({ do: "undo" }) && toast("Taken back.", { action: "Redo", run: () => redo() });
  else toast("There is nothing to take back.");
}

export async function redo() {
  if (store.canRedo) await decide({ do: "redo" }) && toast("Done again.", { action: "Undo", run: () => undo() });
  else toast("There is nothing to do again.");
}

// Another tab, learning and the better map are heard of here.
function listen() {
  const stream = new EventSource("/api/events");
  let mapKind = store.mapKind;
  stream.onmessage = (event) => {
    const facts = JSON.parse(event.data);
    if (facts.version > store.version) refresh().catch(() => {});
    if (facts.map !== mapKind) {
      mapKind = facts.map;
      column("map").then(([map]) => { store.map = map; emit("map"); });
    }
    const was = store.learn.is;
    store.learn = facts.learn;
    emit("learn", was);
  };
  stream.onopen = () => emit("link", true);
  stream.onerror = () => emit("link", false);
}

// --- questions ---------------------------------------------------------------------------------------------------------

export const picture = (photo, size = "small") => `/picture/${store.run}/${size}/${photo}.jpg`;
export const fileName = (photo) => (store.files ? store.files[photo] : `photo ${photo + 1}`);
export const shortName = (photo) => fileName(photo).split("/").pop();

export function placeName(place) {
  if (place === JUNK) return "Junk";
  if (place === STRANGERS) return "Unlike everything";
  return store.groups.get(place)?.name ?? "a group that is gone";
}

export function membersOf(place) {
  const found = [];
  for (let i = 0; i < store.photos; i++) if (store.place[i] === place) found.push(i);
  return found;
}

// Groups in the order of the list: named ones by name, then new ones by size.
export function orderedGroups() {
  const groups = [...store.groups.values()].filter((g) => g.isNamed || (store.sizes.get(g.id) ?? 0) > 0);
  const named = groups.filter((g) => g.isNamed).sort((a, b) => a.name.localeCompare(b.name));
  const others = groups.filter((g) => !g.isNamed).sort((a, b) => (store.sizes.get(b.id) ?? 0) - (store.sizes.get(a.id) ?? 0));
  return [named, others];
}

export const isFinished = (group) => (store.sizes.get(group) ?? 0) === (store.seen.get(group) ?? 0);

// Recent targets first, for the digits.
export const recent = [];

export function remember(group) {
  const at = recent.indexOf(group);
  if (at === 0) return;
  if (at > 0 && at < 9) return; // a digit keeps its class while it is among the first nine
  if (at > 0) recent.splice(at, 1);
  recent.unshift(group);
}

export function targets() {
  const alive = recent.filter((g) => store.groups.has(g));
  const [named, others] = orderedGroups();
  return [...new Set([...alive, ...named.map((g) => g.id), ...others.map((g) => g.id)])].slice(0, 9);
}
