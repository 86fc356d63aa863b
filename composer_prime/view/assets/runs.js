// The first page: every run below the folders, and several laid over each other.
import { h, ago, figure, short, interval, plural, section, table } from "./dom.js";
import { sparkline } from "./chart.js";
import { chartControls, chartGroups, anyFigure } from "./figures.js";
import { link } from "./source.js";

export function runsPage(answer, state, redraw) {
  const text = (state.filter || "").toLowerCase();
  const shown = answer.runs.filter((run) => !text || JSON.stringify([run.id, run.state, run.differs]).toLowerCase().includes(text));
  const picked = state.picked;
  const rewards = [0, ...answer.runs.flatMap((run) => run.spark)];
  const scale = [Math.min(...rewards), Math.max(...rewards)];
  const compare = h(
    "button",
    { type: "button", id: "compare", disabled: picked.size < 2, onclick: () => (location.hash = link(["compare", ...picked])) },
    picked.size < 2 ? "Choose runs to lay over each other" : `Lay ${picked.size} runs over each other`,
  );
  const search = h("input", {
    type: "search", id: "search", placeholder: "name, state or setting", "aria-label": "filter the runs", value: state.filter || "",
    oninput: (event) => { state.filter = event.target.value; redraw(); },
  });
  const columns = [{ title: "", kind: "wide" }, { title: "Run" }, { title: "State" }, { title: "Step", kind: "n" }, { title: "", kind: "wide" }, { title: "Reward", kind: "n", hint: "training: the line is every step, from 0 to the highest of all lines here; the number is the mean of the last ten" },
    { title: "Held-out" }, { title: "Settings unlike most runs here", kind: "wide" }, { title: "Last line", kind: "wide" }];
  return [
    h("h1", null, plural(answer.runs.length, "run"), " ", h("span", { class: "quiet" }, answer.folders.join(", "))),
    h("div", { class: "filters" }, search, compare),
    shown.length ? table(columns, shown.map((run) => runRow(run, scale, picked, redraw)), { id: "runs" }) : h("p", { class: "quiet" }, "No run matches."),
  ];
}

function runRow(run, scale, picked, redraw) {
  const change = (event) => {
    if (event.target.checked) picked.add(run.id);
    else picked.delete(run.id);
    redraw();
  };
  const href = link(["run", run.id]);
  return h(
    "tr",
    { "data-href": href },
    h("td", { class: "wide" }, h("input", { type: "checkbox", checked: picked.has(run.id), onchange: change, "aria-label": `lay ${run.id} over others` })),
    h("td", { class: "w" }, h("a", { href }, h("b", null, run.id)), run.joint && h("div", { class: "quiet small" }, `cluster of ${run.joint}`)),
    h("td", { class: "w" }, h("span", { class: `state ${run.state}` }, run.state)),
    h("td", { class: "n" }, run.max_steps ? `${run.step} / ${run.max_steps}` : run.step),
    h("td", { class: "wide" }, sparkline(run.spark, scale)),
    h("td", { class: "n" }, short(run.reward)),
    h("td", { class: "w" }, heldOut(run.held_out)),
    h("td", { class: "wide" }, Object.entries(run.differs).slice(0, 8).map(([name, value]) => chip(name, value)), moreChips(run.differs)),
    h("td", { class: "wide w quiet" }, ago(run.updated)),
  );
}

function heldOut(ends) {
  if (!ends.length) return h("span", { class: "quiet" }, "–");
  const last = ends[ends.length - 1];
  const before = ends.length > 1 ? `${short(ends[0].mean)} → ` : "";
  return [before, h("b", null, short(last.mean)), h("span", { class: "quiet wide" }, interval(last.low, last.high))];
}

function chip(name, value) {
  const text = value === null || value === undefined ? "unset" : JSON.stringify(value);
  return h("span", { class: "chip", title: name }, `${name.split(".").filter((part) => !/^\d+$/.test(part)).slice(-2).join(".")} `, h("b", null, text.length > 40 ? `${text.slice(0, 40)}…` : text));
}

function moreChips(differs) {
  const count = Object.keys(differs).length - 8;
  return count > 0 && h("span", { class: "quiet small" }, `and ${count} more`);
}

export function comparePage(runs, state, redraw) {
  const names = runs.map((run, index) => h("span", { class: `key c${index % 8}` }, h("a", { href: link(["run", run.id]) }, run.id), " ", h("span", { class: "quiet" }, run.verdict.text)));
  return [
    h("h1", null, `${plural(runs.length, "run")} laid over each other`),
    h("div", null, names.map((name) => h("div", null, name))),
    chartControls(runs, redraw),
    chartGroups(runs),
    anyFigure(runs, state.figure, (name) => { state.figure = name; redraw(); }),
    section("Configuration difference", settingsDifference(runs)),
  ];
}

// One row a setting that is not the same in all runs.
export function settingsDifference(runs) {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.settings)))].sort();
  const rows = names
    .filter((name) => new Set(runs.map((run) => JSON.stringify(run.settings[name]))).size > 1)
    .map((name) => h("tr", null, h("td", { class: "w" }, name), runs.map((run) => h("td", null, JSON.stringify(run.settings[name]) ?? "unset"))));
  if (!rows.length) return h("p", { class: "quiet" }, "The configurations are the same.");
  return table([{ title: "Setting" }, ...runs.map((run) => ({ title: run.id }))], rows);
}

export function roundsTable(run) {
  const rows = run.joint_rounds.map((round) =>
    h(
      "tr",
      null,
      h("td", { class: "n" }, figure(round.round)),
      h("td", { class: "n" }, round.step),
      h("td", null, Object.entries(round.peers).map(([peer, steps]) => h("span", { class: "chip" }, `${peer} `, h("b", null, plural(steps, "step"))))),
      h("td", { class: "n" }, figure(round.sync_s)),
      h("td", { class: "n" }, round.bytes_sent === null ? "–" : `${(round.bytes_sent / 1e6).toFixed(1)} MB`),
      h("td", { class: "n" }, figure(round.rejected)),
    ),
  );
  const columns = [{ title: "Round", kind: "n" }, { title: "Step", kind: "n" }, { title: "Clusters with their inner steps" }, { title: "Waited, s", kind: "n" }, { title: "Sent so far", kind: "n" }, { title: "Rejected", kind: "n" }];
  return table(columns, rows, { class: "rounds" });
}
