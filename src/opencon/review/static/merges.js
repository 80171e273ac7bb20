// "Are these two the same?": pairs of groups that look alike, the likeliest first. One key an answer.

import { el, isTyping, number, openDialog, toast } from "./dom.js";
import { ask, decide, membersOf, picture, store } from "./store.js";

export async function openMerges() {
  const skipped = new Set();
  const { dialog, body, close, isOpen } = openDialog("Are these two the same?", { wide: true });
  let pair = null, busy = false;

  const column = (id, border) => {
    const group = store.groups.get(id);
    const sure = membersOf(id).sort((a, b) => store.confidence[b] - store.confidence[a]);
    const photos = [...new Set([...sure.slice(0, 6), ...border])].slice(0, 12);
    return el("section", { class: "half" }, el("h3", { text: group.name }),
      el("p", { class: "soft", text: number(store.sizes.get(id) ?? 0, "photo") }),
      el("div", { class: "tiles" }, photos.map((photo) => el("img", { alt: "", src: picture(photo) }))));
  };

  const next = async () => {
    busy = true;
    let pairs;
    try { pairs = await ask("/api/merges"); } catch (err) { toast(err.message, { bad: true }); return close(); } finally { busy = false; }
    pair = pairs.find(({ a, b }) => !skipped.has(`${a} ${b}`)) ?? null;
    if (!isOpen()) return;
    if (!pair) {
      body.replaceChildren(el("p", { class: "lead", text: "No two groups look alike any more." }), el("button", { class: "main", text: "Back to the photos", onclick: () => close() }));
      return;
    }
    const left = pairs.filter(({ a, b }) => !skipped.has(`${a} ${b}`)).length;
    body.replaceChildren(
      el("p", { class: "soft", text: `${number(left, "pair")} left to ask about. “The same” merges them; you can always take it back.` }),
      el("div", { class: "halves" }, column(pair.a, pair.border_a), column(pair.b, pair.border_b)),
      el("div", { class: "row center" },
        el("button", { class: "main", onclick: () => answer("same") }, "The same ", el("kbd", { text: "Y" })),
        el("button", { class: "plain", onclick: () => answer("apart") }, "Different ", el("kbd", { text: "N" })),
        el("button", { class: "plain", onclick: () => answer("skip") }, "Not sure ", el("kbd", { text: "→" }))),
    );
    dialog.focus();
  };

  const answer = async (what) => {
    if (!pair || busy) return;
    const { a, b } = pair;
    busy = true;
    if (what === "skip") skipped.add(`${a} ${b}`);
    else if (what === "apart") await decide({ do: "apart", groups: [a, b] });
    else await decide({ do: "merge", groups: [a, b], into: better(a, b) }, "Merged.");
    busy = false;
    next();
  };

  dialog.onkeydown = (event) => {
    if (isTyping(event.target)) return;
    const answers = { y: "same", n: "apart", ArrowRight: "skip" };
    if (!(event.key in answers)) return;
    event.preventDefault();
    event.stopPropagation();
    answer(answers[event.key]);
  };
  await next();
}

// A name that a person gave wins, then the larger group.
export function better(a, b) {
  const [x, y] = [store.groups.get(a), store.groups.get(b)];
  if (x.isNamed !== y.isNamed) return x.isNamed ? a : b;
  return (store.sizes.get(a) ?? 0) >= (store.sizes.get(b) ?? 0) ? a : b;
}
