// Take it with you: folders, tables, a data set.

import { el, number, openDialog, toast } from "./dom.js";
import { JUNK, ask, store } from "./store.js";

export function openTake() {
  const { body } = openDialog("Take it with you");
  const ways = [
    ["copy", "Copies", "one folder for each class; the photos exist twice"],
    ["hardlink", "Hard links", "folders without taking up space, on the same disk"],
    ["symlink", "Symbolic links", "folders of pointers to your photos"],
    ["imagefolder", "A data set", "copies and metadata.csv, as Hugging Face datasets reads it"],
  ];
  const looked = el("input", { type: "checkbox" });
  const name = el("input", { type: "text", value: `sorted-${new Date().toISOString().slice(0, 10)}`, "aria-label": "Name of the new folder", maxlength: "60" });
  const result = el("div", { "aria-live": "polite" });
  const go = el("button", { class: "main", text: "Sort into folders" });
  const link = (form) => el("a", { class: "button", href: `/api/labels/${form}`, download: form, text: form });
  looked.onchange = () => { for (const a of body.querySelectorAll("a")) a.href = `/api/labels/${a.download}${looked.checked ? "?looked=yes" : ""}`; };
  const junk = store.sizes.get(JUNK) ?? 0;
  body.append(
    el("p", { class: "soft", text: `Your photos stay where they are, unchanged.${junk ? ` ${number(junk, "photo")} in Junk will be left out.` : ""}` }),
    el("label", { class: "row" }, looked, ` Only the ${number(store.numLooked, "photo")} that a person has looked at`),
    el("h3", { text: "A table of names" }),
    el("div", { class: "row" }, link("labels.csv"), link("labels.jsonl")),
    el("h3", { text: "Photos in folders" }),
    el("fieldset", {}, el("legend", { class: "hidden", text: "How" }), ways.map(([way, title, words], k) => el("label", { class: "way" },
      el("input", { type: "radio", name: "way", value: way, checked: k === 0 }), el("span", {}, el("b", { text: title }), el("span", { class: "soft", text: ` ${words}` }))))),
    el("label", { class: "row" }, "In a new folder ", name), el("div", { class: "row" }, go), result,
    el("p", { class: "soft" }, "Elsewhere, or to take it back: ", el("code", { text: "opencon sort RUN --into DIR" }), ", ", el("code", { text: "opencon sort --undo DIR" })),
  );
  go.onclick = async () => {
    go.disabled = true;
    result.replaceChildren(el("progress", { "aria-label": "Sorting" }));
    try {
      const way = body.querySelector("input[name=way]:checked").value;
      const answer = await ask("/api/take", { name: name.value.trim(), way, looked: looked.checked });
      result.replaceChildren(
        el("p", { class: "good", text: `${number(answer.photos, "photo")} in ${number(Object.keys(answer.counts).length, "folder")}:` }), el("p", {}, el("code", { text: answer.folder })));
    } catch (err) {
      result.replaceChildren();
      toast(err.message, { bad: true });
    }
    go.disabled = false;
  };
}
