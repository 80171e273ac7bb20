// One photo, large: what it is called, how sure the machine is, and why.

import { el, isTyping, openDialog, percent, toast } from "./dom.js";
import { JUNK, ask, fileName, on, picture, placeName, store, targets } from "./store.js";
import { chooser } from "./chooser.js";

let redrawNow = null;
on("change", () => { if (redrawNow) redrawNow(); });

export function openLarge(photos, at, { send, findSimilar }) {
  if (!photos.length) return;
  const { dialog, body, head, close } = openDialog("Photo", { wide: true, onclose: () => { redrawNow = null; } });
  dialog.classList.add("large");
  const title = head.querySelector("h2");
  const list = [...photos];
  const image = el("img", { class: "big", alt: "" });
  const side = el("div", { class: "why" });
  const stage = el("div", { class: "stage" },
    el("button", { class: "plain icon step", "aria-label": "Previous photo", text: "‹", onclick: () => go(-1) }), image,
    el("button", { class: "plain icon step", "aria-label": "Next photo", text: "›", onclick: () => go(1) }));
  body.append(stage, side);

  const go = (step) => { at = (at + step + list.length) % list.length; draw(); };
  const sendIt = async (to, name) => { if (await send([list[at]], to, name) && at < list.length - 1) go(1); };

  const strip = (words, photos, empty) => el("section", {}, el("h3", { text: words }),
    photos.length ? el("div", { class: "strip" }, photos.map((photo) => el(
      "figure", {}, el("button", { class: "plain thumb", "aria-label": `Show ${fileName(photo)}`, onclick: () => { list.splice(at + 1, 0, photo); go(1); } },
        el("img", { alt: "", src: picture(photo) })),
      el("figcaption", { text: placeName(store.place[photo]) }))))
      : el("p", { class: "soft", text: empty }));

  let asked = 0;
  const facts = () => {
    const photo = list[at], place = store.place[photo];
    title.textContent = `${fileName(photo)}  ·  ${at + 1} of ${list.length}`;
    const target = chooser({ label: "Send this photo to a class", placeholder: "Send to a class, or type a new name", pick: (id, text) => sendIt(id, text), escape: () => dialog.focus() });
    return [
      el("p", { class: "lead" }, el("span", { text: "In " }), el("strong", { text: placeName(place) })),
      el("p", { class: "soft", text: store.looked[photo] ? "A person has placed it." : `The machine is ${percent(store.confidence[photo])} sure.` }),
      target.box,
      el("div", { class: "chips" }, targets().map((g, k) => el("button", { class: "chip", onclick: () => sendIt(g) }, el("kbd", { text: k + 1 }), el("span", { text: store.groups.get(g).name })))),
      el("div", { class: "row" },
        el("button", { class: "plain", text: "Junk (space)", onclick: () => sendIt(JUNK) }),
        el("button", { class: "plain", text: "Find similar (F)", onclick: () => { close(); findSimilar(photo); } })),
    ];
  };
  const draw = async () => {
    const photo = list[at], mine = ++asked;
    image.src = picture(photo, "large");
    image.alt = fileName(photo);
    side.replaceChildren(...facts());
    try {
      const why = await ask(`/api/about/${photo}`);
      if (mine !== asked) return;
      side.append(
        strip("Why here: the most similar photos that a person has placed", why.examples.slice(0, 6), "Nobody has placed a photo yet."),
        strip("What looks most like it", why.similar.slice(0, 6), ""),
        ...(why.twins.length ? [strip("Nearly the same photo", why.twins.slice(0, 6), "")] : []),
      );
    } catch (err) { toast(err.message, { bad: true }); }
  };
  redrawNow = draw;
  dialog.onkeydown = (event) => {
    if (isTyping(event.target) || event.ctrlKey || event.metaKey || event.altKey) return;
    const digit = Number(event.key);
    if (event.key === "ArrowRight" || event.key === "ArrowDown") go(1);
    else if (event.key === "ArrowLeft" || event.key === "ArrowUp") go(-1);
    else if (event.key === " " && event.target.tagName !== "BUTTON") sendIt(JUNK);
    else if (digit >= 1 && digit <= 9 && targets()[digit - 1] !== undefined) sendIt(targets()[digit - 1]);
    else if (event.key === "f") { const photo = list[at]; close(); findSimilar(photo); }
    else return;
    event.preventDefault();
    event.stopPropagation();
  };
  draw();
}
