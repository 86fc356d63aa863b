// The live page: the address says what is shown, and what is shown follows the run.
import { h, replace, section } from "./dom.js";
import { ask, link, readHash } from "./source.js";
import { runsPage, comparePage, roundsTable } from "./runs.js";
import { runHead, overview, costsBlock, settingsBlock, environmentBlock } from "./run.js";
import { rolloutsPage } from "./rollouts.js";
import { rolloutPage, flipPage } from "./rollout.js";
import { evaluationBlock } from "./evaluation.js";
import { chartGroups } from "./figures.js";
import { installKeys, markCurrent } from "./keys.js";

const LIVE_MS = 2000;
const IDLE_MS = 8000;
const main = document.getElementById("main");
const bar = document.getElementById("bar");
const state = { picked: new Set(), filter: "", figure: "", sideBySide: false, isColored: true, siblings: [] };
let shown = { hash: null, answers: null };
let drawing = 0;
let timer = 0;

const go = (hash) => { location.hash = hash; };
const redraw = () => draw({ force: true });

async function draw({ force = false } = {}) {
  const number = (drawing += 1);
  clearTimeout(timer);
  const hash = location.hash;
  const { parts, query } = readHash(hash);
  let wait = IDLE_MS;
  try {
    const page = await build(parts, query);
    if (number !== drawing) return;
    wait = page.live ? LIVE_MS : IDLE_MS;
    const isSame = !force && shown.hash === hash && shown.answers && page.answers.every((answer, index) => answer === shown.answers[index]);
    if (!isSame) show(page, hash);
  } catch (error) {
    if (number !== drawing) return;
    showBar(parts);
    const text = error instanceof TypeError && String(error.message).includes("fetch") ? "The page's server has ended. Start it again: composer view" : error.message;
    if (shown.hash !== hash || !shown.answers) replace(main, h("p", { class: "note bad", role: "alert" }, text));
    else showLost(text);
  }
  if (number === drawing) timer = setTimeout(() => (document.hidden ? (timer = 0) : draw()), wait);
}

function show(page, hash) {
  const focus = document.activeElement?.id;
  const caret = document.activeElement?.selectionStart;
  const isSamePage = shown.hash === hash;
  const place = isSamePage ? window.scrollY : 0;
  const opened = new Set([...main.querySelectorAll("details[open] > summary")].map((summary) => summary.textContent));
  shown = { hash, answers: page.answers };
  showBar(page.crumbs);
  document.title = [...page.crumbs].reverse().join(" · ") || "composer view";
  replace(main, page.nodes);
  if (isSamePage) for (const summary of main.querySelectorAll("details > summary")) if (opened.has(summary.textContent)) summary.parentNode.open = true;
  window.scrollTo(0, place);
  if (focus && document.getElementById(focus)) {
    const element = document.getElementById(focus);
    element.focus({ preventScroll: true });
    if (element.type === "search" && caret !== null) element.setSelectionRange(caret, caret);
  }
  markCurrent(hash);
}

function showLost(text) {
  if (!document.getElementById("lost")) main.prepend(h("p", { class: "note bad", id: "lost", role: "alert" }, text));
}

function showBar(crumbs) {
  const theme = () => {
    const dark = document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    document.documentElement.dataset.theme = dark ? "light" : "dark";
    try { localStorage.setItem("theme", document.documentElement.dataset.theme); } catch { /* no storage */ }
  };
  const path = crumbs.map((crumb, index) => [h("span", { class: "quiet" }, "/"), index === 0 && crumbs.length > 1 ? h("a", { href: link(["run", crumb]) }, crumb) : h("span", null, crumb)]);
  replace(bar, h("nav", { class: "crumbs", "aria-label": "place" }, h("a", { href: "#/" }, h("b", null, "composer view")), path),
    h("div", { class: "right" }, h("button", { type: "button", id: "theme", onclick: theme }, "Light / dark"), h("button", { type: "button", id: "keys", onclick: showHelp, "aria-label": "keys" }, "?")));
}

async function build(parts, query) {
  if (parts[0] === "compare") {
    const runs = await Promise.all(parts.slice(1).map((run) => ask("run", { run })));
    return { crumbs: ["comparison"], answers: runs, nodes: comparePage(runs, state, redraw), live: runs.some((run) => run.state === "running") };
  }
  if (parts[0] === "run" && parts[1]) return runPart(await ask("run", { run: parts[1] }), parts[2] || "", parts.slice(3), query);
  const answer = await ask("runs");
  return { crumbs: [], answers: [answer], nodes: runsPage(answer, state, redraw), live: true };
}

async function runPart(run, tab, rest, query) {
  const page = { crumbs: [run.id, ...(tab ? [tab] : [])], answers: [run], live: run.state === "running" };
  const head = runHead(run, { rollout: "rollouts", flip: "evaluation" }[tab] ?? tab);
  if (tab === "rollouts") {
    const list = await rolloutsPage(run, query, go);
    return { ...page, nodes: [head, list.nodes], live: page.live, answers: [await ask("rollouts", { ...query, run: run.id, limit: 100 })] };
  }
  if (tab === "rollout") {
    const found = await rolloutPage(run, rest, state, redraw);
    state.siblings = found.page.siblings.map((each) => each.entry);
    return { ...page, nodes: [head, found.nodes], answers: [found.page] };
  }
  if (tab === "flip") return { ...page, nodes: [head, await flipPage(run, query)], answers: [] };
  if (tab === "evaluation") {
    const answer = await ask("evaluation", { ...query, run: run.id });
    return { ...page, nodes: [head, evaluationBlock(run, answer, go)], answers: [answer] };
  }
  if (tab === "costs") return { ...page, nodes: [head, costsBlock(run)] };
  if (tab === "settings") return { ...page, nodes: [head, section("Configuration", settingsBlock(run)), section("Environment", environmentBlock(run))] };
  if (tab === "clusters") return { ...page, nodes: [head, await clusters(run)] };
  if (tab) throw new Error(`a run has no page ${tab}`);
  return { ...page, nodes: [head, overview(run, state, redraw)] };
}

async function clusters(run) {
  const list = await ask("runs");
  const peers = await Promise.all(list.runs.filter((each) => each.joint && each.joint === run.joint).sort((first, second) => first.id.localeCompare(second.id)).map((each) => ask("run", { run: each.id })));
  return [section(`Clusters of ${run.joint}`, h("p", null, peers.map((peer, index) => h("span", { class: `key c${index % 8}` }, h("a", { href: link(["run", peer.id]) }, peer.id), " ")))), chartGroups(peers).slice(0, 1),
    peers.map((peer) => section(`Rounds as ${peer.id} logged them`, roundsTable(peer)))];
}

function showHelp() {
  const keys = [["j / k", "next and previous row, or sibling"], ["Enter", "open the row"], ["/", "find"], ["s", "siblings side by side"], ["u", "one level up"], ["t", "light or dark"], ["?", "these keys"]];
  const dialog = h("dialog", { "aria-label": "keys" }, h("h2", null, "Keys"), h("dl", null, keys.map(([key, text]) => [h("dt", null, h("kbd", null, key)), h("dd", null, text)])),
    h("p", { class: "quiet" }, "The address of a page is a link to what it shows."), h("form", { method: "dialog" }, h("button", { autofocus: true }, "Close")));
  replace(document.getElementById("help"), dialog);
  dialog.showModal();
}

try {
  const theme = localStorage.getItem("theme");
  if (theme) document.documentElement.dataset.theme = theme;
} catch { /* no storage */ }
installKeys({ state, redraw, showHelp, go });
addEventListener("hashchange", () => draw());
document.addEventListener("visibilitychange", () => document.hidden || draw());
draw();
