// report.html: the same blocks as the live page, from data inside the file.
import { h, plural, replace, section, table } from "./dom.js";
import { chartGroups } from "./figures.js";
import { verdictBlock, runFacts, eventLog, costsBlock, nodesBlock, settingsBlock, environmentBlock } from "./run.js";
import { evaluationBlock } from "./evaluation.js";
import { rolloutCard } from "./transcript.js";
import { roundsTable } from "./runs.js";

function reportBlocks(data) {
  const run = data.run;
  const cards = data.chosen.map((each) => h("section", null, h("h2", null, each.why), h("p", { class: "quiet" }, each.rollout.task_id), rolloutCard(each.rollout, { tools: true })));
  return [
    verdictBlock(run),
    runFacts(run),
    chartGroups([run]),
    section("What training fixed and broke", evaluationBlock(run, data.evaluation, null)),
    cards.length ? section(`Rollouts of the ${data.chosen[0].entry.kind === "eval" ? "last evaluation" : "last batch"}`, h("div", { class: "columns" }, cards)) : null,
    nodesBlock(run),
    section("Cost", costsBlock(run)),
    run.joint_rounds.length ? section("Rounds of the joint run", roundsTable(run)) : null,
    section("Environment", environmentBlock(run)),
    h("details", null, h("summary", null, plural(Object.keys(run.settings).length, "setting")), settingsBlock(run)),
    h("details", null, h("summary", null, plural(run.events.length, "event")), eventLog(run)),
  ];
}

const reported = JSON.parse(document.getElementById("data").textContent);
replace(document.getElementById("bar"), h("nav", { class: "crumbs" }, h("b", null, reported.run.id), h("span", { class: "quiet" }, "report")),
  h("div", { class: "right quiet small" }, `composer-prime ${reported.version}, ${new Date(reported.written * 1000).toISOString().slice(0, 16).replace("T", " ")} UTC`));
replace(document.getElementById("main"), reportBlocks(reported));
