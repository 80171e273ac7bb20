// Split a group by the machine's suggestion: see the parts first.

import { el, number, openDialog, toast } from "./dom.js";
import { ask, decide, picture, store } from "./store.js";

export async function openSplit(group, done) {
  const { body, close } = openDialog(`Split “${store.groups.get(group).name}”`, { wide: true });
  let number_ = 2, parts = [];
  const count = el("input", { type: "range", min: "2", max: "8", value: "2", "aria-label": "Number of parts" });
  const said = el("output", { text: "2 parts" });
  const rows = el("div", { class: "parts" });
  const go = el("button", { class: "main", text: "Split into these parts" });
  body.append(
    el("p", { class: "soft", text: "The machine suggests these parts. The first keeps its name; each other one becomes a group that you can name." }),
    el("label", { class: "row" }, "How many? ", count, said), rows, el("div", { class: "row center" }, go));
  const refresh = async () => {
    try {
      parts = await ask("/api/parts", { group, parts: number_ });
    } catch (err) { toast(err.message, { bad: true }); return close(); }
    rows.replaceChildren(...parts.map((part, k) => el("section", {}, el("h3", { text: `Part ${k + 1}: ${number(part.length, "photo")}` }),
      el("div", { class: "strip" }, part.slice(0, 14).map((photo) => el("img", { alt: "", src: picture(photo) }))))));
    go.focus();
  };
  count.oninput = () => { number_ = Number(count.value); said.textContent = `${number_} parts`; refresh(); };
  go.onclick = async () => {
    if (!(await decide({ do: "split", group, parts }, `Split into ${parts.length} parts.`))) return;
    close();
    done();
  };
  await refresh();
}
