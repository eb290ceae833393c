"use strict";
const SILENT_MS = 2000;  // after which the server is looked at
const TEXT_TOKENS = 512;  // of a piece where text is continued; a chat's answer ends by itself
const FOLLOW = 48;  // pixels from the end within which a reader is taken to read along
const TAGS = ["p", "br", "strong", "em", "del", "code", "pre", "a", "ul", "ol", "li", "input", "blockquote", "hr",
              "h1", "h2", "h3", "h4", "h5", "h6", "table", "thead", "tbody", "tr", "th", "td"];
const SAFE = {RETURN_DOM_FRAGMENT: true, ALLOWED_TAGS: TAGS, ALLOWED_ATTR: ["href", "class", "align", "start", "type", "checked", "disabled"],
              ADD_URI_SAFE_ATTR: ["align", "start", "type"], ALLOW_DATA_ATTR: false, ALLOW_ARIA_ATTR: false,
              ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i};
const $ = (id) => document.getElementById(id);
const wishes = [...$("settings").querySelectorAll("[name]")];
let model = null, messages = [], before = [], running = null, heard = 0, lost = true;

const headers = () => ({"Content-Type": "application/json", ...($("key").value && {Authorization: `Bearer ${$("key").value}`})});
const number = (n) => n.toLocaleString("en");
const short = (n) => n.toLocaleString("en", {maximumSignificantDigits: 3});
const brief = (ms) => ms < 1000 ? `${Math.max(1, Math.round(ms))} ms` : `${short(ms / 1000)} s`;
const duration = (ms) => ms < 60000 ? `${Math.max(1, Math.ceil(ms / 1000))} s` : `${Math.ceil(ms / 60000)} min`;

function make(tag, kind, ...inside) {
  const made = document.createElement(tag);
  made.className = kind;
  made.append(...inside);
  return made;
}

function button(name, kind, onclick) {
  return Object.assign(make("button", kind, name), {type: "button", onclick});
}

function say(text, bad = false) {
  if ($("state").textContent !== text) $("state").textContent = text;
  $("state").classList.toggle("bad", bad);
}

function used(tokens) {
  $("used").textContent = tokens === null ? "" : `${number(tokens)} of ${number(model.max_model_len)} tokens used`;
}

function buttons() {
  $("send").disabled = !model || Boolean(running);
  $("send").hidden = Boolean(running);
  $("stop").hidden = !running;
  $("back").disabled = Boolean(running) || !(model?.chat ? messages : before).length;
  $("text").readOnly = Boolean(running) && !model.chat;
  $("talk").ariaBusy = Boolean(running);  // what is spoken is the whole answer, not each token
  for (const one of $("talk").querySelectorAll(".again, .edit")) one.disabled = Boolean(running);
}

// ---- what the browser keeps: settings for good, a chat for as long as its tab is open

function keep(where, key, value) {
  try { window[where].setItem(key, JSON.stringify(value)); } catch { /* forbidden, or full: the page works without */ }
}

function kept(where, key) {
  try { return JSON.parse(window[where].getItem(key)); } catch { return null; }
}

const set = () => Object.fromEntries(wishes.filter((one) => one.value.trim()).map((one) => [one.name, one.value]));

// ---- the server

async function begin() {
  const answer = await fetch("v1/models", {headers: headers()});
  lost = answer.status !== 401 && !answer.ok;
  if (answer.status === 401) return locked();
  if (!answer.ok) return;
  const found = (await answer.json()).data[0];
  lost = found.max_model_len === undefined;
  if (lost) return;
  model = found;
  $("lock").hidden = true;
  $("name").textContent = document.title = model.id;
  $("facts").textContent = [model.layout, ...(model.chat ? [] : ["continues text"])].join(" · ");
  document.body.classList.toggle("alone", !model.chat);
  $("talk").hidden = $("told").hidden = !model.chat;  // the text is all there is: it fills the page
  $("talk").dataset.empty = `What would you like to know from ${model.id}?`;
  $("text").spellcheck = model.chat;
  $("text").placeholder = model.chat ? "Write a message" : "Write how it begins";
  $("hint").textContent = model.chat ? "Enter sends · Shift+Enter: new line · Up edits · Esc stops" : "Ctrl+Enter continues · Esc stops";
  $("settings").querySelector("[name=max_tokens]").placeholder = model.chat ? "what fits" : TEXT_TOKENS;
  if (model.chat) show(messages.length ? messages : kept("sessionStorage", "helix.chat") ?? []);
  else {
    $("text").value ||= "def read_json(path):\n";
    $("send").textContent = "Continue";
    $("back").textContent = "Undo";
  }
  used(messages.length ? messages.at(-1).used ?? null : 0);
  say("Ready.");
  buttons();
}

function locked() {
  $("lock").hidden = false;
  say($("key").value ? "The server does not take this key." : "The server needs a key.", true);
  $("key").focus();
}

async function trouble() {
  const answer = await fetch("health").catch(() => null);
  const told = await answer?.json().catch(() => null);  // what a proxy says for a server that is away is no JSON
  if (!told) return "The server does not answer";
  return answer.ok ? "" : `The server is ${told.state}: ${told.reason}`;
}

async function look() {
  if (running ? performance.now() - heard > SILENT_MS : lost) {
    const why = await trouble();
    if (running && why) say(`${why}. The answer goes on once it is back.`, true);
    else if (running && $("state").classList.contains("bad")) say("The server is back: the answer goes on.");
    else if (!running && lost && why) say(`${why}.`, true);
    else if (!running && lost) await begin().catch(() => { lost = true; });
  }
  setTimeout(look, 1000);
}

async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let held = "";;) {
    const {done, value} = await reader.read();
    if (done) throw new Error("The answer broke off.");
    const pieces = (held + value).split("\n\n");
    held = pieces.pop();
    for (const piece of pieces)
      for (const line of piece.split("\n")) {
        if (line === "data: [DONE]") return;
        if (line.startsWith("data: ")) yield JSON.parse(line.slice(6));
      }
  }
}

// ---- Markdown

// A model's HTML is a text like any other, but for the line breaks that tables need; a picture is a link to it.
marked.use({
  breaks: true,
  tokenizer: {html() {}, tag: (text) => /^<br *\/?>/i.test(text) ? false : undefined},
  renderer: {image(token) { return this.link({...token, tokens: [{type: "text", raw: token.text, text: token.text || token.href}]}); }},
});

function nodesOf(token) {
  const safe = DOMPurify.sanitize(marked.parser([token]), SAFE);
  for (const pre of safe.querySelectorAll("pre")) {
    const language = /language-(\S+)/.exec(pre.firstElementChild?.className)?.[1] ?? "";
    const block = make("figure", "code");
    pre.replaceWith(block);
    pre.tabIndex = 0;  // so that keys scroll it
    block.append(make("figcaption", "", make("span", "", language), button("Copy", "", (event) => copy(pre.textContent, event.target))), pre);
  }
  for (const table of safe.querySelectorAll("table")) {
    const around = make("div", "wide");
    table.replaceWith(around);
    around.tabIndex = 0;
    around.append(table);
  }
  for (const link of safe.querySelectorAll("a")) {
    if (link.href) Object.assign(link, {target: "_blank", rel: "noopener noreferrer"});
    else link.replaceWith(...link.childNodes);
  }
  return [...safe.childNodes];
}

// Shows a text that grows: blocks that stay as they are keep their nodes, and what a reader selected in them.
function painter(place) {
  const blocks = [];
  return (text) => {
    const tokens = marked.lexer(text);
    const changed = tokens.findIndex((token, i) => token.raw !== blocks[i]?.raw);
    const from = changed < 0 ? tokens.length : changed;
    for (const block of blocks.splice(from)) block.nodes.forEach((node) => node.remove());
    for (const token of tokens.slice(from)) {
      const nodes = nodesOf(token);
      place.append(...nodes);
      blocks.push({raw: token.raw, nodes});
    }
  };
}

// ---- what is shown

const behind = (box) => box.scrollHeight - box.scrollTop - box.clientHeight;

// Calls `put` at most once a frame, and less often where it takes long; it scrolls along unless its reader has scrolled away.
function writer(scroller, put) {
  let due = 0, free = 0;
  const flush = () => {
    clearTimeout(due);
    due = 0;
    const began = performance.now(), follow = behind(scroller) < FOLLOW;
    put();
    if (follow) scroller.scrollTop = scroller.scrollHeight;
    const now = performance.now();
    free = now + Math.max(16, 3 * (now - began));
  };
  return {flush, later: () => { due ||= setTimeout(flush, Math.max(0, free - performance.now())); }};
}

async function copy(text, pressed) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {  // browsers have none for pages of other hosts without TLS
    const area = document.body.appendChild(make("textarea", "", text));
    area.select();
    document.execCommand("copy");
    area.remove();
    pressed.focus();
  }
  pressed.textContent = "Copied";
  setTimeout(() => { pressed.textContent = "Copy"; }, 1500);
}

function questionBox(message) {
  const does = make("div", "does", button("Copy", "", (event) => copy(message.content, event.target)), button("Edit", "edit", () => edit(message)));
  const box = make("article", "user", make("p", "", message.content), does);
  box.ariaLabel = "Question";
  return box;
}

function answerBox(message) {
  const thoughts = make("p", ""), thinking = make("details", "thinking", make("summary", "", "Thinking"), thoughts), said = make("div", "said");
  const does = make("div", "does", button("Copy", "", (event) => copy(message.content, event.target)),
                    button("Regenerate", "again", () => ask(messages.slice(0, messages.indexOf(message)))));
  const box = make("article", "assistant", thinking, said, does), paint = painter(said);
  box.ariaLabel = "Answer";
  message.paint = () => {
    thinking.hidden = !message.thoughts;
    thoughts.textContent = message.thoughts;
    paint(message.content);
  };
  message.paint();
  return box;
}

// Makes these the messages of the chat; boxes of those that stay are not touched.
function show(wanted) {
  messages = wanted;
  const boxes = messages.map((message) => message.box ??= message.role === "user" ? questionBox(message) : answerBox(message));
  const same = boxes.findIndex((box, i) => box !== $("talk").children[i]);
  const from = same < 0 ? boxes.length : same;
  [...$("talk").children].slice(from).forEach((box) => box.remove());
  $("talk").append(...boxes.slice(from));
  $("talk").scrollTop = $("talk").scrollHeight;
  buttons();
}

// Changes a question; what follows it is answered anew.
function edit(message, content = message.content) {
  const area = Object.assign(make("textarea", ""), {value: content, ariaLabel: "Question"});
  const form = make("form", "", area, make("div", "ends", button("Cancel", "", () => end()), make("button", "strong", "Send")));
  const shown = [...message.box.children];
  const end = () => { message.box.replaceChildren(...shown); $("text").focus(); };
  form.onsubmit = async (event) => {
    event.preventDefault();
    const text = area.value;
    if (running || !text.trim()) return;
    end();
    const turns = [...messages.slice(0, messages.indexOf(message)), {role: "user", content: text}];
    if (!await ask(turns)) edit(message, text);
  };
  form.onkeydown = (event) => {
    if (event.key === "Escape") { event.stopPropagation(); end(); }
    else if (wants(event, true)) { event.preventDefault(); form.requestSubmit(); }
  };
  message.box.replaceChildren(form);
  area.focus();
}

function prefill(told, first) {
  const share = told.processed / told.total, since = told.processed > first.processed ? first : {processed: 0, time_ms: 0};
  const left = (told.total - told.processed) * (told.time_ms - since.time_ms) / (told.processed - since.processed);
  $("progress").value = share;
  $("progress").classList.toggle("on", share < 1);
  say(`Reading the prompt: ${number(told.processed)} of ${number(told.total)} tokens`
    + (share < 1 ? `, about ${duration(left)} left` : ""));
}

// ---- a run

// Streams an answer to `take`, piece by piece, and says what goes on. Returns the error that ended it, and the tokens of the
// sequence where they are known.
async function stream(path, wanted, take) {
  const {system, ...sampling} = set();
  for (const name in sampling) sampling[name] = Number(sampling[name]);
  const body = {model: model.id, stream: true, stream_options: {include_usage: true}, return_progress: true, ...wanted, ...sampling};
  if (system && body.messages) body.messages = [{role: "system", content: system}, ...body.messages];
  const sent = performance.now();
  running = new AbortController();
  heard = sent;
  buttons();
  used(null);
  say("Waiting.");
  let began = null, last = null, progress = null, usage = null, why = null, failed = null;
  try {
    const answer = await fetch(path, {method: "POST", headers: headers(), body: JSON.stringify(body), signal: running.signal});
    if (!answer.ok) {
      lost = answer.status === 503;
      if (answer.status === 401) locked();
      const told = await answer.json().catch(() => null);
      lost ||= !told;
      throw new Error(told ? `${lost ? "The server is " : ""}${told.error.message}` : "The server does not answer.");
    }
    for await (const event of events(answer)) {
      heard = performance.now();
      if (event.error) throw new Error(event.error.message);
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
  running = null;
  $("progress").classList.remove("on");
  const first = began ? ` · first token after ${brief(began - sent)}` : "";
  if (failed?.name === "AbortError") say(`Stopped${first}`);
  else if (failed) {
    lost ||= failed instanceof TypeError;  // the connection
    say(failed instanceof TypeError ? "The connection to the server broke off." : failed.message, true);
  } else {
    const rate = last > began ? ` · ${short((usage.completion_tokens - 1) * 1000 / (last - began))} tokens/s` : "";
    const cached = usage.prompt_tokens_details.cached_tokens;
    say(`${number(usage.prompt_tokens)} tokens read${cached ? ` (${number(cached)} cached)` : ""} · `
      + `${number(usage.completion_tokens)} written${why === "length" ? ", the most it may" : ""}${rate}${first}`);
  }
  const tokens = usage && usage.prompt_tokens + usage.completion_tokens;
  used(tokens);
  return {failed, tokens};
}

// Answers a chat. Where it fails before a word was said, the chat is as it was, and the result is false.
async function ask(turns) {
  const old = messages, answer = {role: "assistant", content: "", thoughts: ""};
  show([...turns, answer]);
  answer.box.classList.add("busy");
  const {flush, later} = writer($("talk"), answer.paint);
  const ended = await stream("v1/chat/completions", {messages: turns.map(({role, content}) => ({role, content}))}, ({delta}) => {
    answer.thoughts += delta.reasoning_content ?? "";
    answer.content += delta.content ?? "";
    later();
  });
  flush();
  answer.box.classList.remove("busy");
  answer.used = ended.tokens;
  const done = Boolean(answer.content) || !ended.failed;
  if (!done) {
    show(old);
    used(old.length ? old.at(-1).used ?? null : 0);
  }
  keep("sessionStorage", "helix.chat", messages.map(({role, content, thoughts, used}) => ({role, content, thoughts, used})));
  buttons();
  $("text").focus();
  return done;
}

async function send() {
  const text = $("text").value;
  if (!model || running || !text.trim()) return;
  $("text").value = "";
  if (!await ask([...messages, {role: "user", content: text}])) $("text").value ||= text;
}

async function goOn() {
  const text = $("text"), prompt = text.value;
  if (!model || running || !prompt) return;
  let waiting = "";
  const {flush, later} = writer(text, () => {
    text.setRangeText(waiting, text.value.length, text.value.length, "end");
    waiting = "";
  });
  before.push(prompt);
  text.scrollTop = text.scrollHeight;
  await stream("v1/completions", {prompt, max_tokens: TEXT_TOKENS}, (choice) => { waiting += choice.text; later(); });
  flush();
  if (text.value === prompt) before.pop();
  buttons();
  text.focus();
}

function back() {
  if (model.chat) {
    show([]);
    keep("sessionStorage", "helix.chat", []);
    used(0);
    say("Ready.");
  } else {
    $("text").value = before.pop();
    used(null);
    say("As before.");
  }
  buttons();
  $("text").focus();
}

// ---- what is pressed

const wants = (event, chat) => event.key === "Enter" && !event.isComposing && (chat ? !event.shiftKey : event.ctrlKey || event.metaKey);
const run = () => model?.chat ? send() : goOn();

$("form").onsubmit = (event) => { event.preventDefault(); run(); };
$("stop").onclick = () => running?.abort();
$("back").onclick = back;
$("lock").onsubmit = (event) => { event.preventDefault(); begin().catch(() => { lost = true; }); };
$("talk").onscroll = () => { $("last").hidden = behind($("talk")) < FOLLOW; };
$("last").onclick = () => { $("talk").scrollTop = $("talk").scrollHeight; };
$("text").onkeydown = (event) => {
  if (wants(event, model?.chat)) {
    event.preventDefault();
    run();
  } else if (event.key === "ArrowUp" && model?.chat && !running && !event.target.value) {
    const question = messages.findLast((message) => message.role === "user");
    if (question) { event.preventDefault(); edit(question); }
  }
};
document.onkeydown = (event) => { if (event.key === "Escape" && !$("settings").open) running?.abort(); };
$("open").onclick = () => $("settings").showModal();
$("settings").onclick = (event) => { if (event.target === $("settings")) $("settings").close(); };  // beside it
$("settings").oninput = () => keep("localStorage", "helix.settings", set());
$("clear").onclick = () => { for (const one of wishes) one.value = ""; $("settings").oninput(); };
for (const one of wishes) one.value = kept("localStorage", "helix.settings")?.[one.name] ?? "";
look();
