// The list of chats, and the dialog to rename, export or delete one.
import {records} from "./chats.js";
import {$, button, download, make} from "./dom.js";

const narrow = matchMedia("(max-width: 52rem)");  // as in page.css: the list lies over the conversation
let given = null, marked = {shown: null, answering: null};

// Initializes the list: `open(id)` opens a chat, `find(id)` returns it without showing it.
export function begin(handlers) {
  given = handlers;
  $("list").hidden = false;
  showList(!narrow.matches);
  fill();
}

export function showList(shown) {
  $("chats").hidden = !shown;
  $("list").ariaExpanded = shown;
  $("main").inert = shown && narrow.matches;
}

// Closes the list if it covers the conversation; returns whether it did.
export function close() {
  const over = narrow.matches && !$("chats").hidden;
  if (over) {
    showList(false);
    $("list").focus();
  }
  return over;
}

// Reloads the list; marks the chat shown and the one being answered.
export async function fill(marks = marked) {
  marked = marks;
  const items = (await records()).map(({id, title}) => {
    const link = Object.assign(make("a", "", title), {href: `#${id}`, title});
    if (id === marked.shown) link.ariaCurrent = "page";
    if (id === marked.answering) link.classList.add("busy");
    const more = Object.assign(button("⋯", "icon", () => change(id)), {ariaLabel: `Rename, export or delete ${title}`, title: "Rename, export or delete"});
    return make("li", "", link, more);
  });
  $("chats").querySelector("ul").replaceChildren(...items);
}

async function change(id) {
  const chat = await given.find(id);
  if (!chat) return fill();
  const {record} = chat, file = () => record.title.match(/[\p{L}\p{N}]+/gu)?.join("-").slice(0, 60) ?? "chat";
  $("rename").value = record.title;
  $("rename").oninput = () => { record.title = $("rename").value.trim() || record.title; };
  $("markdown").onclick = () => download(`${file()}.md`, "text/markdown", chat.markdown(given.model()));
  $("json").onclick = () => download(`${file()}.json`, "application/json", chat.json());
  $("delete").textContent = "Delete";
  $("delete").onclick = async () => {
    if ($("delete").textContent === "Delete") $("delete").textContent = "Delete for good";
    else {
      given.forget(id);
      await chat.remove();
      $("chat").close();
    }
  };
  $("chat").onclose = async () => { await chat.save(); fill(); };  // Escape, Enter and Close keep the title alike
  $("chat").showModal();
}

$("list").onclick = () => {
  showList($("chats").hidden);
  if (!$("chats").hidden && narrow.matches) $("chats").querySelector("a, button")?.focus();
};
$("room").onclick = (event) => {
  const away = event.target === $("room") || event.target.closest("a");  // beside the list, or a chat is chosen
  if (narrow.matches && !$("chats").hidden && away) showList(false);
};
narrow.onchange = () => { if (given) showList(!narrow.matches); };
document.addEventListener("visibilitychange", () => { if (given && !document.hidden) fill(); });  // what other tabs did
