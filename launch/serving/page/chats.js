// Chats and their storage in the browser. A chat is a tree of messages: an edited question and a regenerated answer
// become another version next to the old one, so that nothing is lost. `leaf` is the last message shown.
import {$} from "./dom.js";

const TITLE = 80;  // characters

const opened = new Promise((resolve, reject) => {
  const request = indexedDB.open("helix", 1);
  request.onupgradeneeded = () => {
    request.result.createObjectStore("chats", {keyPath: "id"});
    request.result.createObjectStore("messages", {keyPath: "id"}).createIndex("chat", "chat");
  };
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

async function transact(mode, act) {
  const transaction = (await opened).transaction(["chats", "messages"], mode);
  const result = act(transaction.objectStore("chats"), transaction.objectStore("messages"));
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve(result?.result);
    transaction.onabort = () => reject(transaction.error);
  });
}

// Storage may be forbidden or full: the page works without it, and says so.
const write = (act) => transact("readwrite", act).catch(() => { $("unkept").hidden = false; });

let count = 0;
// Ids sort by creation time: the browser returns records in the order of ids.
const newId = () => [Date.now(), count++, Math.floor(Math.random() * 36 ** 5)].map((part, i) => part.toString(36).padStart([9, 4, 5][i], "0")).join("");

export class Chat {
  gone = false;

  constructor(record = {id: newId(), title: "", leaf: null, updated: 0}, messages = []) {
    Object.assign(this, {record, messages});
  }

  get id() { return this.record.id; }

  find(id) { return this.messages.find((message) => message.id === id); }

  // The messages shown: from the first question to the leaf.
  get path() {
    const path = [];
    for (let at = this.find(this.record.leaf); at; at = this.find(at.parent)) path.unshift(at);
    return path;
  }

  versions(message) { return this.messages.filter((one) => one.parent === message.parent); }

  add(role, content, parent = this.record.leaf) {
    const message = {id: newId(), chat: this.id, parent, role, content, reasoning_content: "", finish_reason: null, tokens: null};
    this.messages.push(message);
    this.record.title ||= content.trim().split("\n")[0].slice(0, TITLE);
    this.record.updated = Date.now();
    this.show(message);
    this.save(message);
    return message;
  }

  // Shows a message, and after it the newest ones that follow it.
  show(message) {
    for (let next = message; next; next = this.messages.findLast((one) => one.parent === next.id)) this.record.leaf = next.id;
    this.save();
  }

  // Removes messages at the end, and shows what was shown before.
  drop(messages, leaf) {
    this.messages = this.messages.filter((one) => !messages.includes(one));
    this.record.leaf = leaf;
    if (!this.messages.length) return this.remove();
    write((_, stored) => messages.forEach((one) => stored.delete(one.id)));
    return this.save();
  }

  async save(message = null) {
    if (this.gone) return;
    await write((chats, stored) => {
      chats.put(this.record);
      if (message) stored.put(message);
    });
  }

  async remove() {
    this.gone = true;
    await write((chats, stored) => {
      chats.delete(this.id);
      const keys = stored.index("chat").getAllKeys(this.id);
      keys.onsuccess = () => keys.result.forEach((key) => stored.delete(key));
    });
  }

  // Exports the conversation shown as Markdown, or the whole tree as JSON.
  markdown(model) {
    const turns = this.path.map(({role, content}) => `## ${role === "user" ? "Question" : model}\n\n${content.trim()}\n`);
    return [`# ${this.record.title}\n`, ...turns].join("\n");
  }

  json() {
    const {id, title, leaf} = this.record;
    return JSON.stringify({id, title, leaf, messages: this.messages.map(({chat, ...message}) => message)}, null, 2);
  }
}

// The records of all chats, latest first.
export async function records() {
  const all = await transact("readonly", (chats) => chats.getAll()).catch(() => {
    $("unkept").hidden = false;
    return [];
  });
  return all.sort((a, b) => b.updated - a.updated);
}

export async function load(id) {
  const record = await transact("readonly", (chats) => chats.get(id)).catch(() => null);
  const messages = record && await transact("readonly", (_, stored) => stored.index("chat").getAll(id));
  return record ? new Chat(record, messages) : null;
}
