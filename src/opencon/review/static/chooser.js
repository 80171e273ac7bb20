// A field with suggestions: type a class, or a new name. Arrows, Enter and Escape work as everywhere.

import { el, number } from "./dom.js";
import { orderedGroups, store } from "./store.js";

let counter = 0;

// options: () => [{id, name, note}]; pick(id or null, text): an option, or a name that none has.
export function chooser({ label, placeholder, pick, options = allGroups, fresh = (text) => `Make a new group “${text}”`, value = "", escape = () => {} }) {
  const id = `list-${++counter}`;
  let shown = [], at = -1;
  const list = el("ul", { id, role: "listbox", class: "choices", hidden: true, "aria-label": label });
  const input = el("input", {
    type: "text", role: "combobox", "aria-expanded": "false", "aria-controls": id, "aria-autocomplete": "list",
    "aria-label": label, placeholder, autocomplete: "off", spellcheck: "false", value, maxlength: "120",
  });
  const box = el("div", { class: "chooser" }, input, list);

  const close = () => { list.hidden = true; input.setAttribute("aria-expanded", "false"); input.removeAttribute("aria-activedescendant"); at = -1; };

  const refresh = () => {
    const text = input.value.trim(), words = text.toLowerCase();
    const all = options();
    const starts = all.filter((o) => o.name.toLowerCase().startsWith(words));
    const holds = all.filter((o) => !starts.includes(o) && o.name.toLowerCase().includes(words));
    shown = [...starts, ...holds].slice(0, 12);
    const exact = all.some((o) => o.name === text);
    if (text && !exact && fresh) shown.push({ id: null, name: text, note: "", isFresh: true });
    list.replaceChildren(...shown.map((option, k) => el(
      "li", { role: "option", id: `${id}-${k}`, "aria-selected": "false", onpointerdown: (event) => { event.preventDefault(); take(k); } },
      el("span", { text: option.isFresh ? fresh(option.name) : option.name }),
      option.note ? el("span", { class: "soft", text: option.note }) : null,
    )));
    list.hidden = shown.length === 0;
    input.setAttribute("aria-expanded", String(!list.hidden));
    highlight(text && shown.length ? 0 : -1);
  };

  const highlight = (to) => {
    at = to;
    [...list.children].forEach((item, k) => item.setAttribute("aria-selected", String(k === at)));
    if (at >= 0) { input.setAttribute("aria-activedescendant", `${id}-${at}`); list.children[at].scrollIntoView({ block: "nearest" }); }
    else input.removeAttribute("aria-activedescendant");
  };

  const take = (k) => {
    const option = shown[k];
    close();
    if (option) pick(option.id, option.name);
  };

  input.addEventListener("input", refresh);
  input.addEventListener("focus", refresh);
  input.addEventListener("blur", close);
  input.addEventListener("keydown", (event) => {
    if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      if (list.hidden) refresh();
      const step = event.key === "ArrowDown" ? 1 : -1;
      if (shown.length) highlight((at + step + shown.length) % shown.length);
      event.preventDefault();
    } else if (event.key === "Enter") {
      event.preventDefault();
      const text = input.value.trim();
      if (at >= 0 && (text || shown[at])) take(at);
      else if (text) { close(); pick(null, text); }
    } else if (event.key === "Escape") {
      event.stopPropagation();
      event.preventDefault();
      close();
      escape();
    }
  });
  return { box, input, close };
}

export function allGroups() {
  const [named, others] = orderedGroups();
  return [...named, ...others].map((g) => ({ id: g.id, name: g.name, note: number(store.sizes.get(g.id) ?? 0, "photo") }));
}
