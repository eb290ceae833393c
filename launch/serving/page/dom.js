// Elements, formats and small values in the browser's storage.

export const $ = (id) => document.getElementById(id);
export const number = (n) => n.toLocaleString("en");
export const short = (n) => n.toLocaleString("en", {maximumSignificantDigits: 3});
export const brief = (ms) => ms < 1000 ? `${Math.max(1, Math.round(ms))} ms` : `${short(ms / 1000)} s`;
export const duration = (ms) => ms < 60000 ? `${Math.max(1, Math.ceil(ms / 1000))} s` : `${Math.ceil(ms / 60000)} min`;

export function make(tag, kind, ...inside) {
  const made = document.createElement(tag);
  made.className = kind;
  made.append(...inside);
  return made;
}

export function button(name, kind, onclick) {
  return Object.assign(make("button", kind, name), {type: "button", onclick});
}

export function say(text, bad = false) {
  if ($("state").textContent !== text) $("state").textContent = text;
  $("state").classList.toggle("bad", bad);
}

// Storage is "localStorage", which lasts, or "sessionStorage", which ends with the tab.
export function keep(storage, key, value) {
  try { window[storage].setItem(key, JSON.stringify(value)); } catch { /* forbidden or full: the page works without it */ }
}

export function kept(storage, key) {
  try { return JSON.parse(window[storage].getItem(key)); } catch { return null; }
}

export async function copy(text, pressed) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {  // browsers have no clipboard for remote pages without TLS
    const area = document.body.appendChild(make("textarea", "", text));
    area.select();
    document.execCommand("copy");
    area.remove();
    pressed.focus();
  }
  pressed.textContent = "Copied";
  setTimeout(() => { pressed.textContent = "Copy"; }, 1500);
}

export function download(name, type, text) {
  const link = Object.assign(make("a", ""), {href: URL.createObjectURL(new Blob([text], {type})), download: name});
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
}
