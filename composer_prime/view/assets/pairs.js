// Preference pairs with the votes of their teachers.
import { h, figure, plural } from "./dom.js";

export function pairsBlock(run, answer, turn) {
  if (!answer.total) return h("p", { class: "quiet" }, "This run has no preference pairs (replay-DPO is off, or its file is elsewhere).");
  const last = Math.min(answer.offset + answer.page, answer.total);
  const move = (to, text) => h("button", { type: "button", disabled: to < 0 || to >= answer.total, onclick: () => turn(to) }, text);
  return [
    h("p", { class: "filters" }, h("span", { class: "quiet" }, `${answer.offset + 1}–${last} of ${plural(answer.total, "pair")} in ${answer.file}`), move(answer.offset - answer.page, "Back"), move(answer.offset + answer.page, "Next")),
    answer.pairs.map((pair) => pairCard(pair)),
  ];
}

function pairCard(pair) {
  const votes = Object.entries(pair.teachers || {});
  return h(
    "article",
    { class: "rollout block" },
    h("header", null, h("b", null, String(pair.trace)), pair.epsilon !== null && pair.epsilon !== undefined && h("span", { class: "quiet" }, `epsilon ${figure(pair.epsilon)}`), pair.cost_usd ? h("span", { class: "quiet" }, `$${figure(pair.cost_usd)}`) : ""),
    pair.earlier > 0 && h("p", { class: "quiet" }, `${plural(pair.earlier, "earlier message")} left out`),
    pair.messages.map((message) => messageBlock(message.role, message)),
    h("div", { class: "two" }, h("div", null, h("h3", { class: "good" }, "chosen"), messageBlock("", pair.chosen)), h("div", null, h("h3", { class: "bad" }, "rejected"), messageBlock("", pair.rejected))),
    votes.length > 0 && h("details", null, h("summary", null, plural(votes.length, "vote")), h("pre", { class: "plain" }, votes.map(([name, vote]) => `${name}: ${typeof vote === "string" ? vote : JSON.stringify(vote)}`).join("\n"))),
  );
}

function messageBlock(role, message) {
  if (!message || typeof message !== "object") return h("pre", { class: "plain" }, String(message));
  const content = typeof message.content === "string" ? message.content : JSON.stringify(message.content ?? "");
  const calls = (message.tool_calls || []).map((call) => h("pre", { class: "call" }, `${call.function?.name ?? call.name}(${call.function?.arguments ?? call.arguments})`));
  const body = h("div", null, content && h("pre", null, content), calls);
  return role ? h("div", { class: "turn" }, h("div", { class: "who" }, role), body) : body;
}
