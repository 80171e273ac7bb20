// Elements from plain text. Names of files and classes are hostile: they only ever become text, never markup.

export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  const { src, ...others } = attributes;
  for (const [key, value] of Object.entries({ ...others, src })) { // a picture is asked for last, once it is known to be lazy
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "text") node.textContent = value;
    else if (key in { value: 1, checked: 1, disabled: 1, hidden: 1 }) node[key] = value;
    else node.setAttribute(key, value === true ? "" : String(value));
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

export const byId = (id) => document.getElementById(id);

export function number(count, one, many = `${one}s`) {
  return `${count.toLocaleString("en")} ${count === 1 ? one : many}`;
}

// How sure a machine is, in words that promise nothing.
export function percent(share) {
  return share > 0.99 ? "more than 99 %" : `${Math.round(100 * share)} %`;
}

let toastTimer = 0;

// A short word at the bottom; with a button to take it back.
export function toast(text, { action = null, run = null, bad = false } = {}) {
  const box = byId("toast");
  box.replaceChildren(el("span", { text }));
  if (action) box.append(el("button", { class: "plain", text: action, onclick: () => { hideToast(); run(); } }));
  box.className = `toast show${bad ? " bad" : ""}`;
  clearTimeout(toastTimer);
  toastTimer = setTimeout(hideToast, bad ? 9000 : 6000);
}

function hideToast() {
  byId("toast").className = "toast";
}

// For a screen reader alone.
export function speak(text) {
  byId("spoken").textContent = text;
}

export function isTyping(target) {
  return target instanceof HTMLInputElement || target instanceof HTMLTextAreaElement || target instanceof HTMLSelectElement;
}

let opened = 0; // how many dialogs there were
let finish = () => {}; // what is left to do for the last one

// One dialog at a time, with a title; returns its parts. What comes back late closes its own dialog, never a newer one.
export function openDialog(title, { wide = false, onclose = null } = {}) {
  const dialog = byId("dialog"), mine = ++opened;
  if (dialog.open) dialog.close();
  finish(); // a browser tells of a closed dialog a little later, perhaps when the next one is open already
  const isOpen = () => dialog.open && opened === mine;
  const close = () => { if (isOpen()) dialog.close(); };
  const body = el("div", { class: "dialogbody" });
  const head = el(
    "header", {},
    el("h2", { id: "dialogtitle", text: title }),
    el("button", { class: "plain icon", "aria-label": "Close", text: "✕", onclick: close }),
  );
  dialog.className = wide ? "wide" : "";
  dialog.replaceChildren(head, body);
  finish = () => {
    finish = () => {};
    dialog.onkeydown = null;
    if (onclose) onclose();
  };
  dialog.onclose = () => { if (!dialog.open) { finish(); dialog.replaceChildren(); } };
  dialog.onclick = (event) => { if (event.target === dialog) close(); };
  dialog.tabIndex = -1;
  dialog.showModal();
  dialog.focus(); // not on a button: a space or Enter must not press what nobody chose
  return { dialog, body, head, close, isOpen };
}
