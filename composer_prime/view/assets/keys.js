// Keys: j k move, Enter opens, / finds, s shows siblings side by side, u goes up, t changes the colors, ? lists them.
import { readHash, link } from "./source.js";
import { rolloutLink } from "./rollouts.js";

const places = new Map();

function rows() {
  return [...document.querySelectorAll("main tr[data-href]")];
}

export function markCurrent(hash) {
  const place = places.get(hash);
  rows().forEach((row, index) => row.classList.toggle("current", index === place));
}

function move(step, { state, go }) {
  const { parts } = readHash(location.hash);
  if (parts[2] === "rollout") {
    const at = state.siblings.findIndex((entry) => entry.rollout_id === parts[5]);
    const next = state.siblings[at + step];
    if (next) go(rolloutLink({ id: parts[1] }, next));
    return;
  }
  const all = rows();
  if (!all.length) return;
  const before = places.get(location.hash);
  const place = before === undefined ? 0 : Math.min(Math.max(before + step, 0), all.length - 1);
  places.set(location.hash, place);
  markCurrent(location.hash);
  all[place].scrollIntoView({ block: "nearest" });
}

function up(go) {
  const { parts, query } = readHash(location.hash);
  if (parts[2] === "rollout") go(link(["run", parts[1], "rollouts"], { kind: parts[3] === "step" ? "" : parts[3], step: parts[4] }));
  else if (parts[2] === "flip") go(link(["run", parts[1], "evaluation"], { before: query.before, after: query.after }));
  else if (parts[2]) go(link(["run", parts[1]]));
  else go("#/");
}

export function installKeys({ state, redraw, showHelp, go }) {
  document.addEventListener("click", (event) => {
    const row = event.target.closest("tr[data-href]");
    if (row && !event.target.closest("a, input, button")) go(row.dataset.href);
  });
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
    if (event.target.closest("input, select, textarea")) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    const actions = {
      j: () => move(1, { state, go }),
      k: () => move(-1, { state, go }),
      "/": () => document.getElementById("search")?.focus(),
      s: () => { state.sideBySide = !state.sideBySide; redraw(); },
      u: () => up(go),
      t: () => document.getElementById("theme")?.click(),
      "?": showHelp,
      Enter: () => {
        const row = rows()[places.get(location.hash) ?? -1];
        if (row && !event.target.closest("a, button, summary")) go(row.dataset.href);
      },
    };
    if (actions[event.key]) {
      if (event.key !== "Enter") event.preventDefault();
      actions[event.key]();
    }
  });
}
