// The conversation of `composer chat --page`. The server has it; this page draws each change of it, and sends what you do.
import { h, plural, replace, seconds } from "./dom.js";
import { link } from "./source.js";
import { SHADES, shadeLegend, toolsBlock, turnBlock } from "./transcript.js";

const AGAIN_MS = 2000;
const NEAR_END_PX = 120;
const KEY = "chat-key";
let chatKey = null;
let chat = null;
let chatShade = "logprobs";
let following = false;

const head = h("div");
const transcript = h("div", { class: "rollout", id: "chat" });
const status = h("p", { class: "filters", id: "chat-status", role: "status" });
const trouble = h("div");
const say = h("textarea", { id: "say", rows: 3, "aria-label": "your message", placeholder: "Your message. Enter sends it, Shift+Enter begins a line.", onkeydown: onSayKey });
const send = h("button", { type: "button", id: "send", onclick: () => sendText() }, "Send");
const chatView = [head, transcript, trouble, status, h("div", { class: "say" }, say, send)];

export function chatPage(query) {
  if (query.key) {
    chatKey = query.key;
    try { sessionStorage.setItem(KEY, chatKey); } catch { /* no storage: the key ends with the page */ }
    history.replaceState(null, "", link(["chat"]));
  }
  try { chatKey ??= sessionStorage.getItem(KEY); } catch { /* no storage */ }
  setTimeout(follow);
  return { crumbs: ["chat"], answers: [chatView], nodes: chatView, live: false };
}

async function call(path, body) {
  const headers = { "X-Chat-Key": chatKey ?? "" };
  const options = body === undefined ? { headers, cache: "no-store" } : { method: "POST", headers: { ...headers, "Content-Type": "application/json" }, body: JSON.stringify(body) };
  let response;
  try {
    response = await fetch(`/api/chat${path}`, options);
  } catch {
    throw new Error("The conversation's server has ended. Start it again: composer chat --page");
  }
  const answer = await response.json().catch(() => ({ error: "there is no conversation here: start one with composer chat RUN --page" }));
  if (!response.ok) throw new Error(answer.error);
  return answer;
}

// Ask for the next change until another page is shown. The server answers when there is one.
async function follow() {
  if (following) return;
  following = true;
  while (location.hash.startsWith("#/chat")) {
    try {
      const next = await call(chat ? `?seen=${chat.seen}` : "");
      if (!chat || next.seen !== chat.seen || document.getElementById("chat-lost")) drawChat(next);
      chat = next;
      await new Promise((done) => setTimeout(done, 50));
    } catch (error) {
      replace(trouble, h("p", { class: "note bad", id: "chat-lost", role: "alert" }, error.message));
      chat = null;
      await new Promise((done) => setTimeout(done, AGAIN_MS));
    }
  }
  following = false;
}

async function act(name, body = {}) {
  try {
    await call(`/${name}`, body);
    return true;
  } catch (error) {
    replace(trouble, h("p", { class: "note bad", role: "alert" }, error.message));
    return false;
  }
}

async function sendText() {
  const text = say.value;
  if (!text.trim() || chat?.for_s !== null) return;
  say.value = "";
  if (!(await act("say", { text }))) say.value ||= text;
}

function onSayKey(event) {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  sendText();
}

function drawChat(next) {
  const isNearEnd = window.innerHeight + window.scrollY > document.body.scrollHeight - NEAR_END_PX;
  if (!chat || headOf(chat) !== headOf(next)) {
    const focus = document.activeElement?.id;
    drawHead(next);
    if (focus) document.getElementById(focus)?.focus({ preventScroll: true });
  }
  drawTurns(next);
  replace(trouble, next.problem && h("p", { class: "note bad", id: "chat-problem", role: "alert" }, next.problem));
  if (next.unsaid && next.unsaid !== chat?.unsaid) say.value ||= next.unsaid;
  const isAnswering = next.for_s !== null;
  send.disabled = isAnswering;
  const partial = isAnswering ? next.turns[next.turns.length - 1].tokens?.texts.length ?? 0 : 0;
  replace(status, isAnswering
    ? [h("span", { class: "state running" }, `${next.doing || "the model"}: ${seconds(next.for_s)}${partial ? `, ${plural(partial, "token")}` : ""}`), h("button", { type: "button", id: "stop-chat", onclick: () => act("stop") }, "Stop (x)")]
    : h("span", { class: "quiet" }, next.used_tokens === null ? `${next.context_tokens.toLocaleString("en-US")} tokens of context` : `${next.used_tokens.toLocaleString("en-US")} of ${plural(next.context_tokens, "token")} of context used`));
  if (isNearEnd) window.scrollTo(0, document.body.scrollHeight);
}

// What the head shows: it is drawn again only when this changes, so that a field keeps what is being typed.
function headOf(state) {
  return JSON.stringify([state.model, state.settings, state.task, state.tools]);
}

function drawHead(state) {
  const number = (id, title, value, step, least, most) => h("label", null, title, h("input", { type: "number", id, value, step, min: least, max: most, onchange: () => changeSettings(state) }));
  const shades = SHADES.slice(0, 2).map(([name, title]) => h("option", { value: name, selected: name === chatShade }, title));
  const shade = h("select", { id: "shade", onchange: (event) => { chatShade = event.target.value; drawHead(chat); drawTurns(chat); } }, shades);
  const system = h("textarea", { id: "chat-system", rows: 2, "aria-label": "system message", onchange: () => changeSettings(state) });
  system.value = state.settings.system || "";
  replace(head,
    h("h1", null, state.run ? h("a", { href: link(["run", state.run]) }, state.model) : state.model),
    h("p", { class: "filters" },
      number("chat-temperature", "temperature", state.settings.temperature, 0.1, 0, 100), number("chat-max-tokens", "longest answer", state.settings.max_tokens, 1, 1, state.context_tokens),
      h("label", null, "color tokens by", shade), chatShade && shadeLegend([], chatShade),
      h("button", { type: "button", id: "new-chat", onclick: () => act("new") }, "New conversation (n)")),
    h("details", { open: Boolean(state.settings.system) }, h("summary", null, "system message (a change begins anew)"), h("div", { class: "say" }, system)),
    state.task !== null && taskBlock(state));
}

function taskBlock(state) {
  const index = h("input", { type: "number", id: "chat-task", value: state.task, min: 0, max: state.num_tasks === null ? null : state.num_tasks - 1, onchange: () => act("task", { index: numberOf(index, state.task) }) });
  return [h("p", { class: "filters" }, h("label", null, "task", index, state.num_tasks === null ? "" : `of ${state.num_tasks.toLocaleString("en-US")}`), h("span", null, state.question.slice(0, 200)),
    h("button", { type: "button", id: "ask-task", onclick: () => act("task", { index: numberOf(index, state.task), ask: true }) }, "Ask it")), toolsBlock(state.tools)];
}

function drawTurns(state) {
  replace(transcript, state.turns.length ? state.turns.map((turn, index) => turnBlock(turn, index, chatShade)) : h("p", { class: "quiet" }, "Nothing has been said yet."));
}

// An emptied field gets its last value back: Number("") would be 0.
function numberOf(field, last) {
  return Number(field.value ||= last);
}

function changeSettings(state) {
  const value = (name) => numberOf(document.getElementById(`chat-${name.replace("_", "-")}`), state.settings[name]);
  act("settings", { temperature: value("temperature"), max_tokens: value("max_tokens"), system: document.getElementById("chat-system").value });
}
