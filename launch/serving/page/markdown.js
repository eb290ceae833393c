// Renders an answer's Markdown, with formulas and highlighted code. All HTML goes through the sanitizer.
import {button, copy, make} from "./dom.js";

const TAGS = ["p", "br", "strong", "em", "del", "code", "pre", "a", "ul", "ol", "li", "input", "blockquote", "hr",
              "h1", "h2", "h3", "h4", "h5", "h6", "table", "thead", "tbody", "tr", "th", "td"];
const SAFE = {RETURN_DOM_FRAGMENT: true, ALLOWED_TAGS: TAGS, ALLOWED_ATTR: ["href", "class", "align", "start", "type", "checked", "disabled"],
              ADD_URI_SAFE_ATTR: ["align", "start", "type"], ALLOW_DATA_ATTR: false, ALLOW_ARIA_ATTR: false,
              ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i};
const SPANS = {RETURN_DOM_FRAGMENT: true, ALLOWED_TAGS: ["span"], ALLOWED_ATTR: ["class"]};
const HIGHLIGHTED = 100_000;  // characters of code; highlighting more while it is written takes too long
const MATH = {throwOnError: true, strict: "ignore", trust: false, maxSize: 50};
const CLOSE = {"\\(": "\\)", "\\[": "\\]", "$$": "$$"};
// One dollar opens a formula where no word ends, and closes it before no word: US$ 5, $HOME:$PATH and $5-$10 are none.
const DOLLARS = /^\$(?![\s$])((?:\\[^\n]|[^\\$`\n])+)(?<![\s\\])\$(?![\w$])/;
const PRICE = /^\d(?![\d.,]*$)(?!.*[\\^_={}<>+*])/;  // nor is text between two prices

const escaped = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
const plain = (text) => ({type: "text", raw: text, text});
const rendered = ({raw, display}) => `<code class="math${display ? " display" : ""}">${escaped(raw.trim())}</code>`;

const formulaInText = {
  name: "math",
  level: "inline",
  start: (text) => text.search(/\\[([]|(?<![\w$\\])\$/),
  tokenizer(text) {
    const open = text.slice(0, 2), end = CLOSE[open] ? text.indexOf(CLOSE[open], 2) : -1;
    if (end > 2) return {type: "math", raw: text.slice(0, end + 2), display: open !== "\\("};
    if (open === "\\(" || open === "\\[") return plain(text);  // still being written
    const found = DOLLARS.exec(text);
    return found && !PRICE.test(found[1]) ? {type: "math", raw: found[0], display: false} : undefined;
  },
  renderer: rendered,
};

const formulaOfLines = {
  name: "mathBlock",
  level: "block",
  start: (text) => text.match(/\n {0,3}(?:\$\$|\\\[)/)?.index,
  tokenizer(text) {
    const open = /^ {0,3}(\$\$|\\\[)/.exec(text);
    if (!open) return undefined;
    const end = text.indexOf(CLOSE[open[1]], open[0].length);
    if (end < 0) {  // still being written
      const raw = /^[^]*?(?:\n{2,}|$)/.exec(text)[0];
      return {type: "paragraph", raw, text: raw, tokens: [plain(raw)]};
    }
    const rest = /^[ \t]*(?:\n+|$)/.exec(text.slice(end + 2));
    return rest ? {type: "mathBlock", raw: text.slice(0, end + 2) + rest[0], display: true} : undefined;
  },
  renderer: (token) => `<p>${rendered(token)}</p>`,
};

// HTML from the model is shown as text, except line breaks, which tables need; images become links.
marked.use({
  breaks: true,
  extensions: [formulaInText, formulaOfLines],
  tokenizer: {html() {}, tag: (text) => /^<br *\/?>/i.test(text) ? false : undefined},
  renderer: {image(token) { return this.link({...token, tokens: [{type: "text", raw: token.text, text: token.text || token.href}]}); }},
});

function formula(code) {
  const source = code.textContent, marks = source.startsWith("$") && !source.startsWith("$$") ? 1 : 2;
  const place = make("span", code.className);
  code.replaceWith(place);
  try {
    katex.render(source.slice(marks, -marks), place, {...MATH, displayMode: place.classList.contains("display")});
  } catch {
    place.textContent = source;  // as it was written
  }
}

function codeBlock(pre) {
  const code = pre.firstElementChild, language = /language-(\S+)/.exec(code?.className)?.[1] ?? "";
  const block = make("figure", "code"), text = pre.textContent;
  if (hljs.getLanguage(language) && text.length < HIGHLIGHTED)
    code.replaceChildren(DOMPurify.sanitize(hljs.highlight(text, {language, ignoreIllegals: true}).value, SPANS));
  pre.replaceWith(block);
  pre.tabIndex = 0;  // scrollable by keyboard
  block.append(make("figcaption", "", make("span", "", language), button("Copy", "", (event) => copy(text, event.target))), pre);
}

export function nodesOf(token) {
  const safe = DOMPurify.sanitize(marked.parser([token]), SAFE);
  safe.querySelectorAll("code.math").forEach(formula);
  safe.querySelectorAll("pre").forEach(codeBlock);
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

// Renders a growing text: unchanged blocks keep their nodes, and so the reader's selection.
export function painter(place) {
  let blocks = [];
  return (text) => {
    const tokens = marked.lexer(text);
    const changed = tokens.findIndex((token, i) => token.raw !== blocks[i]?.raw);
    const from = changed < 0 ? tokens.length : changed;
    for (const block of blocks.slice(from)) block.nodes.forEach((node) => node.remove());
    blocks = blocks.slice(0, from);
    for (const token of tokens.slice(from)) {
      const nodes = nodesOf(token);
      place.append(...nodes);
      blocks.push({raw: token.raw, nodes});
    }
  };
}
