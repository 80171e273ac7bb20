// Learn again: the machine uses what was decided, shows what would change, and waits for a yes.

import { el, number, openDialog, toast } from "./dom.js";
import { ask, decide, on, picture, placeName, store } from "./store.js";

let redrawNow = null;
on("learn", (was) => {
  if (redrawNow) redrawNow();
  else if (was === "running" && store.learn.is === "done") toast("Learning is done.", { action: "See what would change", run: openLearn });
  else if (was === "running" && store.learn.is === "failed") toast("Learning failed.", { action: "Why?", run: openLearn, bad: true });
});

export async function openLearn() {
  const { body, close, isOpen } = openDialog("Learn again", { wide: true, onclose: () => { redrawNow = null; } });
  const tell = async (what) => {
    try { await ask("/api/learn", what); } catch (err) { toast(err.message, { bad: true }); }
    draw();
  };
  const begin = () => {
    const more = el("input", { type: "checkbox" });
    return [
      el("p", { class: "lead", text: "The machine takes what you have named, moved, merged and split as examples, and sorts the other photos again." }),
      el("p", { class: "soft", text: `Photos that you have looked at (${store.numLooked.toLocaleString("en")}) stay where they are. You see what would change before anything does, and can take it back later.` }),
      el("label", { class: "row" }, more, " Look for further new groups as well"),
      el("div", { class: "row center" }, el("button", { class: "main", text: "Learn", disabled: !store.canLearn, onclick: () => tell({ do: "start", more: more.checked }) })),
      store.canLearn ? null : el("p", { class: "soft", text: "This discovery kept no features. Run opencon discover again, then review." }),
    ];
  };
  const running = (status) => [
    el("p", { class: "lead", text: `Learning: ${status.stage} …` }), el("progress", { "aria-label": "Learning" }),
    el("p", { class: "soft", text: `${Math.round(status.seconds)} s so far. You can close this and go on; you will be told.` }),
    el("div", { class: "row center" }, el("button", { class: "plain", text: "Stop", onclick: () => tell({ do: "discard" }) })),
  ];
  const failed = (status) => [
    el("p", { class: "lead", text: "That did not work." }), el("p", { class: "soft", text: status.why }),
    el("div", { class: "row center" }, el("button", { class: "main", text: "Back", onclick: () => tell({ do: "discard" }) })),
  ];
  const name = (place, status) => status.groups[place] ?? placeName(place);
  const done = (status) => {
    const fresh = Object.values(status.groups);
    const words = [`${number(status.moved, "photo")} would move`, fresh.length ? `${number(fresh.length, "new group")} (${fresh.join(", ")})` : "no new group"];
    if (status.gone.length) words.push(`${number(status.gone.length, "group")} would be empty and go (${status.gone.map(placeName).join(", ")})`);
    return [
      el("p", { class: "lead", text: `${words.join("; ")}.` }),
      el("div", { class: "ways" }, status.ways.slice(0, 40).map((way) => el("section", {},
        el("h3", {}, el("span", { text: `${way.number} from ` }), el("b", { text: name(way.from, status) }), el("span", { text: " to " }), el("b", { text: name(way.to, status) })),
        el("div", { class: "strip" }, way.photos.slice(0, 12).map((photo) => el("img", { alt: "", src: picture(photo), loading: "lazy" })))))),
      el("div", { class: "row center stick" },
        el("button", { class: "main", text: "Accept", onclick: async () => { if (await decide({ do: "learned" }, "Learned.")) close(); } }),
        el("button", { class: "plain", text: "Throw away", onclick: async () => { await tell({ do: "discard" }); close(); } })),
    ];
  };
  const draw = async () => {
    let status;
    try { status = await ask("/api/learn"); } catch (err) { return toast(err.message, { bad: true }); }
    if (!isOpen()) return;
    const views = { idle: begin, running, failed, done };
    const key = JSON.stringify(status);
    if (body.dataset.key === key) return;
    const wasRunning = body.dataset.is === "running" && status.is === "running";
    body.dataset.key = key;
    body.dataset.is = status.is;
    if (wasRunning) { // keep the bar where it is
      body.querySelector(".lead").textContent = `Learning: ${status.stage} …`;
      body.querySelector(".soft").textContent = `${Math.round(status.seconds)} s so far. You can close this and go on; you will be told.`;
      return;
    }
    body.replaceChildren(...views[status.is](status).filter(Boolean));
    if (status.is === "idle") body.querySelector(".main").focus();
  };
  redrawNow = draw;
  await draw();
}
