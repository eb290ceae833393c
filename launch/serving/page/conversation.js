// Shows the conversation: a box with buttons for each question and answer.
import {$, button, copy, make} from "./dom.js";
import {painter} from "./markdown.js";

const FOLLOW = 48;  // pixels: a reader this close to the end follows the answer
const boxes = new WeakMap();  // by message, so that a box stays while its message is shown

// What the buttons do; the page sets it: ask(question text, parent), regenerate(answer), resume(answer), choose(version).
export const actions = {};

export const atEnd = (box) => box.scrollHeight - box.scrollTop - box.clientHeight < FOLLOW;

// Calls `put` at most once per frame, less often if it is slow; scrolls along unless the reader has scrolled away.
export function writer(scroller, put) {
  let due = 0, free = 0;
  const flush = () => {
    clearTimeout(due);
    due = 0;
    const began = performance.now(), follow = atEnd(scroller);
    put();
    if (follow) scroller.scrollTop = scroller.scrollHeight;
    const now = performance.now();
    free = now + Math.max(16, 3 * (now - began));
  };
  return {flush, later: () => { due ||= setTimeout(flush, Math.max(0, free - performance.now())); }};
}

function questionBox(message) {
  const does = make("div", "does", make("span", "versions"), button("Copy", "", (event) => copy(message.content, event.target)),
                    button("Edit", "edit", () => edit(message)));
  const box = make("article", "user", make("p", "", message.content), does);
  box.ariaLabel = "Question";
  return {box, paint() {}};
}

function answerBox(message) {
  const thoughts = make("p", ""), thinking = make("details", "thinking", make("summary", "", "Thinking"), thoughts), said = make("div", "said");
  const does = make("div", "does", make("span", "versions"), button("Copy", "", (event) => copy(message.content, event.target)),
                    button("Regenerate", "again", () => actions.regenerate(message)), button("Continue", "resume", () => actions.resume(message)));
  const box = make("article", "assistant", thinking, said, does), write = painter(said);
  box.ariaLabel = "Answer";
  return {box, paint() {
    thinking.hidden = !message.reasoning_content;
    thoughts.textContent = message.reasoning_content;
    write(message.content);
  }};
}

function shownAs(message) {
  if (!boxes.has(message)) {
    boxes.set(message, message.role === "user" ? questionBox(message) : answerBox(message));
    boxes.get(message).paint();
  }
  return boxes.get(message);
}

export const paint = (message) => shownAs(message).paint();

// Shows a chat; reuses the boxes that stay.
export function show(chat) {
  const path = chat.path, wanted = path.map((message) => shownAs(message).box), turns = $("turns");
  const same = wanted.findIndex((box, i) => box !== turns.children[i]);
  const from = same < 0 ? wanted.length : same;
  [...turns.children].slice(from).forEach((box) => box.remove());
  turns.append(...wanted.slice(from));
  $("talk").scrollTop = $("talk").scrollHeight;
  for (const message of path) showVersions(chat, message);
}

function showVersions(chat, message) {
  const place = shownAs(message).box.querySelector(".versions"), versions = chat.versions(message), at = versions.indexOf(message);
  const step = (name, sign, by) => {
    const to = versions[at + by], made = button(sign, "step", () => {
      actions.choose(to);
      shownAs(to).box.querySelector(".step:not(:disabled)").focus();
    });
    return Object.assign(made, {ariaLabel: name, disabled: !to});
  };
  place.replaceChildren(...versions.length < 2 ? []
    : [step("Previous version", "‹", -1), `${at + 1}/${versions.length}`, step("Next version", "›", 1)]);
}

// Enables the buttons, and marks the answer that is being written.
export function setButtons(chat, answering) {
  const last = chat.path.at(-1);
  for (const {box, message} of chat.path.map((message) => ({...shownAs(message), message}))) {
    box.classList.toggle("busy", message === answering);
    for (const one of box.querySelectorAll(".again, .edit, .resume")) one.disabled = Boolean(answering);
    const resume = box.querySelector(".resume");
    if (resume) resume.hidden = message !== last || message.finish_reason === "stop" || !message.content;
  }
  $("talk").ariaBusy = last !== undefined && last === answering;  // screen readers read the whole answer, not each token
}

// Edits a question: it becomes another version, which is answered.
export function edit(message, content = message.content) {
  const {box} = shownAs(message);
  const area = Object.assign(make("textarea", ""), {value: content, ariaLabel: "Question"});
  const form = make("form", "", area, make("div", "ends", button("Cancel", "", () => end()), make("button", "strong", "Send")));
  const shown = [...box.children];
  const end = () => { box.replaceChildren(...shown); $("text").focus(); };
  form.onsubmit = async (event) => {
    event.preventDefault();
    const text = area.value;
    if (!text.trim() || !actions.free()) return;
    end();
    if (!await actions.ask(text, message.parent)) edit(message, text);
  };
  form.onkeydown = (event) => {
    if (event.key === "Escape") { event.stopPropagation(); end(); }
    else if (sends(event)) { event.preventDefault(); form.requestSubmit(); }
  };
  box.replaceChildren(form);
  area.focus();
}

export const sends = (event) => event.key === "Enter" && !event.isComposing && !event.shiftKey;
