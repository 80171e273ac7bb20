// What the page is for, and its keys.

import { el, openDialog } from "./dom.js";

const KEYS = [
  ["Arrows", "go from photo to photo; with Shift: select on the way"],
  ["X", "select this photo, or not"], ["Ctrl A", "select all in view"], ["Esc", "select nothing"],
  ["1 … 9", "send the selected photos to one of the classes at the bottom"], ["C", "type the class to send them to"],
  ["Space", "send them to Junk"], ["Backspace", "undo, without end"], ["Y", "redo"],
  ["Enter", "see this photo large, and why it is where it is"], ["F", "find photos similar to this one"],
  ["G", "all good: this group has been looked at; on to the next"], ["N", "name this group"], ["S", "split this group"],
  ["B", "bring in more: photos elsewhere that might belong here"], ["Q", "same or not? likely merges, one by one"],
  ["[  ]", "previous and next group"], ["L", "learn again"], ["T", "take it with you"], ["M", "show or hide the map"],
  ["+  −", "larger or smaller pictures"], ["/", "find a file name"], ["?", "this page"],
];

export function openHelp() {
  const { body } = openDialog("How this works", { wide: true });
  const steps = [
    ["Look at a group.", "The machine put photos together that look alike. Those it is least sure of come first."],
    ["Put right what is wrong.", "Click a photo to select it; with Ctrl or Shift, or by dragging, select many. Then press a digit, or type a class at the bottom. Or draw around points on the map."],
    ["Name it, and say “All good”.", "A group with a name becomes a class. The next group comes by itself."],
    ["Learn again.", "From a few corrections the machine sorts the rest anew. You see what would change before it does."],
    ["Take it with you.", "Folders, a table or a data set. Your photos are never touched, and every step can be undone."],
  ];
  body.append(
    el("ol", { class: "steps" }, steps.map(([title, words]) => el("li", {}, el("b", { text: `${title} ` }), words))),
    el("h3", { text: "Keys" }),
    el("dl", { class: "keys" }, KEYS.map(([key, words]) => el("div", {}, el("dt", {}, el("kbd", { text: key })), el("dd", { text: words })))),
  );
}
