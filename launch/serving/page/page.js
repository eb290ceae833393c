// The page: questions and answers, the state line, settings and keys.
import {Chat, load} from "./chats.js";
import {actions, atEnd, edit, paint, sends, setButtons, show, writer} from "./conversation.js";
import {$, brief, duration, keep, kept, number, say, short} from "./dom.js";
import * as list from "./list.js";
import {Lost, events, hasKey, health, models, post, useKey} from "./server.js";

const SILENT_MS = 2000;  // of silence before a health check
const LOOK_MS = 1000, SELDOM_MS = 8000;  // interval of health checks, at first and at most
const TRIES = 3;  // to resume an answer that gets no more tokens
const SAVE_MS = 300;
const TEXT_TOKENS = 512;  // per continuation of text; a chat's answer ends by itself
const inputs = [...$("settings").querySelectorAll("[name]")];
// `running` has the answer's abort controller, its chat and message, and a callback for when the server is back.
let model = null, chat = new Chat(), before = [], running = null, heard = 0, lost = true, pause = LOOK_MS;
let settings = kept("localStorage", "helix.settings") ?? {};

function used(tokens) {
  if (running?.chat && running.chat !== chat) return;  // of a chat that is not shown
  $("used").textContent = tokens === null ? "" : `${number(tokens)} of ${number(model.max_model_len)} tokens used`;
}

function focusText() {
  if (matchMedia("(hover: hover)").matches) $("text").focus();  // a phone would open its keyboard
}

function buttons() {
  $("send").disabled = !model || Boolean(running);
  $("send").hidden = Boolean(running);
  $("stop").hidden = !running;
  $("back").disabled = model?.chat ? !chat.messages.length : Boolean(running) || !before.length;
  $("text").readOnly = Boolean(running) && !model.chat;
  if (model?.chat) setButtons(chat, running?.answer);
}

// ---- the server

async function begin() {
  const answer = await models();
  lost = answer.status !== 401 && !answer.ok;
  if (answer.status === 401) return locked();
  if (!answer.ok) return;
  const found = (await answer.json()).data[0], first = !model;
  if (!first && model.chat !== found.chat) return location.reload();
  model = found;
  $("lock").hidden = true;
  $("name").textContent = $("name").title = document.title = model.id;
  $("facts").textContent = [model.layout, ...(model.chat ? [] : ["continues text"])].join(" · ");
  document.body.classList.toggle("alone", !model.chat);
  $("talk").hidden = $("told").hidden = !model.chat;  // without a chat, the text fills the page
  $("turns").dataset.empty = `What would you like to know from ${model.id}?`;
  $("text").spellcheck = model.chat;
  $("text").placeholder = model.chat ? "Write a message" : "Write how it begins";
  $("hint").textContent = model.chat ? "Enter sends · Shift+Enter: new line · Up edits · Esc stops" : "Ctrl+Enter continues · Esc stops";
  $("settings").querySelector("[name=max_tokens]").placeholder = model.chat ? "what fits" : TEXT_TOKENS;
  if (running) return running.goOn?.(true);
  if (first && model.chat) {
    showSystem();
    list.begin({find, forget, model: () => model.id});
    await openChat();
  } else if (first) {
    $("text").value ||= "def read_json(path):\n";
    $("send").textContent = "Continue";
    $("back").querySelector("span").textContent = "Undo";
    used(0);
    say("Ready.");
  } else say("Ready.");
  buttons();
}

function locked() {
  $("lock").hidden = false;
  say(hasKey() ? "The server rejects this API key." : "The server needs an API key.", true);
  $("key").focus();
}

// Checks an unavailable server, at growing intervals, and a server whose answer has stalled.
async function look() {
  const silent = running && !running.goOn && performance.now() - heard > SILENT_MS;
  if (silent || lost) {
    const {trouble} = await health();
    pause = trouble ? Math.min(2 * pause, SELDOM_MS) : LOOK_MS;
    if (trouble) say(running ? `${trouble}. The answer goes on once it is back.` : `${trouble}.`, true);
    else if (lost) await begin().catch(() => { lost = true; });
    else if (running && $("state").classList.contains("bad")) say("The server is back: the answer goes on.");
  } else pause = LOOK_MS;
  setTimeout(look, pause);
}

function prefill(told, first) {
  const share = told.processed / told.total, since = told.processed > first.processed ? first : {processed: 0, time_ms: 0};
  const left = (told.total - told.processed) * (told.time_ms - since.time_ms) / (told.processed - since.processed);
  $("progress").value = share;
  $("progress").classList.toggle("on", share < 1);
  say(`Reading the prompt: ${number(told.processed)} of ${number(told.total)} tokens`
    + (share < 1 ? `, about ${duration(left)} left` : ""));
}

// Streams an answer to `take`, piece by piece, and shows the progress. Returns the error that ended it (null: none), the
// finish reason, and the tokens of the sequence if known.
async function stream(path, wanted, take) {
  const {system, ...sampling} = settings;
  for (const name in sampling) sampling[name] = Number(sampling[name]);
  const body = {model: model.id, stream: true, stream_options: {include_usage: true}, return_progress: true, ...wanted, ...sampling};
  if (system && body.messages) body.messages = [{role: "system", content: system}, ...body.messages];
  const {signal} = running.controller, sent = heard = performance.now();
  buttons();
  used(null);
  say("Waiting.");
  let began = null, last = null, progress = null, usage = null, why = null, failed = null;
  try {
    for await (const event of events(await post(path, body, signal), signal)) {
      heard = performance.now();
      if (event.prompt_progress) prefill(event.prompt_progress, progress ??= event.prompt_progress);
      usage = event.usage ?? usage;
      for (const choice of event.choices) {
        why = choice.finish_reason ?? why;
        if (!(choice.text || choice.delta?.content || choice.delta?.reasoning_content)) continue;
        began ??= heard;
        last = heard;
        $("progress").classList.remove("on");
        say(choice.delta?.reasoning_content ? "Thinking." : "Writing.");
        take(choice);
      }
    }
  } catch (error) {
    failed = error;
  }
  $("progress").classList.remove("on");
  const first = began ? ` · first token after ${brief(began - sent)}` : "";
  if (failed?.name === "AbortError") say(`Stopped${first}`);
  else if (failed) {
    say(failed.message, true);
    if (failed.status === 401) locked();
  } else {
    const rate = last > began ? ` · ${short((usage.completion_tokens - 1) * 1000 / (last - began))} tokens/s` : "";
    const cached = usage.prompt_tokens_details.cached_tokens;
    say(`${number(usage.prompt_tokens)} tokens read${cached ? ` (${number(cached)} cached)` : ""} · `
      + `${number(usage.completion_tokens)} written${why === "length" ? ", the limit" : ""}${rate}${first}`);
  }
  const tokens = usage && usage.prompt_tokens + usage.completion_tokens;
  used(tokens);
  return {failed, why, tokens};
}

// Waits until the server is back; false if the user stops the answer before.
function serverBack() {
  lost = true;
  pause = LOOK_MS;
  const why = $("state").textContent.replace(/\.$/, "");
  say(`${why[0].toUpperCase()}${why.slice(1)}. The answer goes on once the server is back.`, true);
  return new Promise((resolve) => {
    running.goOn = resolve;
    running.controller.signal.onabort = () => resolve(false);
  }).finally(() => { running.goOn = null; });
}

// ---- a chat

// Writes an answer to a message, or continues the text it has; waits for an unavailable server. Returns whether there is text.
async function answerOf(of, answer) {
  running = {controller: new AbortController(), chat: of, answer, goOn: null};
  keep("sessionStorage", "helix.answering", answer.id);
  list.fill({shown: chat.id, answering: of.id});
  let saved = 0, tries = TRIES, ended = null;
  const {flush, later} = writer($("talk"), () => paint(answer));
  const length = () => answer.content.length + answer.reasoning_content.length;
  const path = of.path.slice(0, -1).map(({role, content}) => ({role, content}));
  do {
    const had = length(), {content, reasoning_content} = answer;
    const more = content && {messages: [...path, {role: "assistant", content, ...(reasoning_content && {reasoning_content})}], continue_final_message: true};
    if (!content) answer.reasoning_content = "";  // reasoning without an answer starts over
    ended = await stream("v1/chat/completions", more || {messages: path}, ({delta}) => {
      answer.reasoning_content += delta.reasoning_content ?? "";
      answer.content += delta.content ?? "";
      later();
      saved ||= setTimeout(() => { saved = 0; of.save(answer); }, SAVE_MS);
    });
    tries = length() > had ? TRIES : tries - 1;
  } while (ended.failed instanceof Lost && tries && await serverBack());
  clearTimeout(saved);
  flush();
  if (ended.failed?.name !== "AbortError" && running.controller.signal.aborted) say("Stopped");  // while the server was away
  running = null;
  keep("sessionStorage", "helix.answering", null);
  answer.finish_reason = ended.failed ? "abort" : ended.why;
  answer.tokens = ended.tokens;
  const done = Boolean(length()) || !ended.failed;
  if (done) await of.save(answer);
  list.fill({shown: chat.id, answering: null});
  buttons();
  return done;
}

// Asks a new question after `parent`. Without an answer the chat is restored, and the result is false.
async function ask(text, parent = chat.record.leaf) {
  const of = chat, leaf = of.record.leaf;
  const question = of.add("user", text, parent);
  return begun(of, leaf, [question, of.add("assistant", "")]);
}

async function begun(of, leaf, added) {
  show(of);
  if (location.hash !== `#${of.id}`) history.pushState(null, "", `#${of.id}`);
  const done = await answerOf(of, added.at(-1));
  if (!done) {
    await of.drop(added, leaf);
    if (of === chat) refresh();
    if (of.gone) forget(of.id);
    list.fill();
  }
  focusText();
  return done;
}

function refresh() {
  show(chat);
  buttons();
  $("used").textContent = "";
  used(chat.messages.length ? chat.path.at(-1)?.tokens ?? null : 0);
}

Object.assign(actions, {
  ask,
  free: () => Boolean(model) && !running,
  regenerate: (answer) => {
    const leaf = chat.record.leaf;
    return begun(chat, leaf, [chat.add("assistant", "", answer.parent)]);
  },
  resume: (answer) => answerOf(chat, answer),
  choose: (version) => { chat.show(version); refresh(); },
});

const find = async (id) => [chat, running?.chat].find((one) => one?.id === id) ?? await load(id);

// Opens the chat in the URL, or a new one.
async function openChat() {
  const id = location.hash.slice(1), found = id ? await find(id) : null;
  if (id !== location.hash.slice(1)) return;  // the URL has changed meanwhile
  chat = found ?? new Chat();
  refresh();
  list.fill({shown: chat.id, answering: running?.chat?.id});
  focusText();
  if (running) return;
  say("Ready.");
  const last = chat.path.at(-1);  // resume the answer that was running when this tab was reloaded
  if (last && kept("sessionStorage", "helix.answering") === last.id) answerOf(chat, last);
}

function forget(id) {
  if (running?.chat?.id === id) running.controller.abort();
  if (chat.id !== id) return;
  history.replaceState(null, "", location.pathname);
  chat = new Chat();
  refresh();
}

async function send() {
  const text = $("text").value;
  if (!text.trim()) return;
  $("text").value = "";
  if (!await ask(text)) $("text").value ||= text;
}

// ---- text completion

async function goOn() {
  const text = $("text"), prompt = text.value;
  if (!prompt) return;
  let waiting = "";
  const {flush, later} = writer(text, () => {
    text.setRangeText(waiting, text.value.length, text.value.length, "end");
    waiting = "";
  });
  before.push(prompt);
  text.scrollTop = text.scrollHeight;
  running = {controller: new AbortController(), goOn: null};
  const {failed} = await stream("v1/completions", {prompt, max_tokens: TEXT_TOKENS}, (choice) => { waiting += choice.text; later(); });
  running = null;
  lost ||= failed instanceof Lost;
  flush();
  if (text.value === prompt) before.pop();
  buttons();
  focusText();
}

function back() {
  if (model.chat) {
    history.pushState(null, "", location.pathname);
    openChat();
  } else {
    $("text").value = before.pop();
    used(null);
    say("As before.");
    buttons();
    focusText();
  }
}

// ---- settings

function showSystem() {
  const {system} = settings;
  $("system").hidden = !system;
  $("system").querySelector("span").textContent = system?.trim().split("\n")[0] ?? "";
  $("system").querySelector("p").textContent = system ?? "";
}

const fillSettings = () => { for (const one of inputs) one.value = settings[one.name] ?? ""; };

$("open").onclick = () => $("settings").showModal();
for (const dialog of [$("settings"), $("chat")]) dialog.onclick = (event) => { if (event.target === dialog) dialog.close(); };  // outside of it
$("settings").oninput = () => {
  const right = inputs.filter((one) => one.value.trim() && one.validity.valid);
  settings = Object.fromEntries(right.map((one) => [one.name, one.value]));
  keep("localStorage", "helix.settings", settings);
  showSystem();
};
// Close, Escape and a click outside keep valid values and drop invalid ones.
$("settings").onclose = () => {
  const wrong = inputs.find((one) => !one.validity.valid);
  if (wrong) say(`${wrong.labels[0].firstChild.data.trim()} is left out: ${wrong.validationMessage}`, true);
  fillSettings();
};
$("clear").onclick = () => { for (const one of inputs) one.value = ""; $("settings").oninput(); };

// ---- buttons and keys

function run() {
  if (!model || running) return;
  if (model.chat) send();
  else goOn();
}

$("form").onsubmit = (event) => { event.preventDefault(); run(); };
$("stop").onclick = () => running?.controller.abort();
$("back").onclick = back;
$("lock").onsubmit = (event) => {
  event.preventDefault();
  useKey($("key").value);
  begin().catch(() => { lost = true; });
};
$("talk").onscroll = () => { $("last").hidden = atEnd($("talk")); };
$("last").onclick = () => { $("talk").scrollTop = $("talk").scrollHeight; };
$("text").onkeydown = (event) => {
  if (model?.chat ? sends(event) : event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    run();
  } else if (event.key === "ArrowUp" && model?.chat && !running && !event.target.value) {
    const question = chat.path.findLast((message) => message.role === "user");
    if (question) { event.preventDefault(); edit(question); }
  }
};
document.onkeydown = (event) => {
  if (event.key === "Escape" && !document.querySelector("dialog[open]") && !list.close()) running?.controller.abort();
};
addEventListener("hashchange", () => { if (model?.chat) openChat(); });
addEventListener("pagehide", () => { if (running?.chat) running.chat.save(running.answer); });
fillSettings();
look();
