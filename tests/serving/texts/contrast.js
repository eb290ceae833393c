(() => {
  const rgb = (c) => c.match(/[\d.]+/g).map(Number);
  const linear = (v) => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
  const lit = (c) => rgb(c).slice(0, 3).map((v, i) => linear(v / 255) * [.2126, .7152, .0722][i])
    .reduce((a, b) => a + b);
  const behind = (e) => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;
    if (rgb(c)[3] !== 0) return c; } };
  const shown = [...document.querySelectorAll("body *")].filter((e) => e.offsetParent && !e.disabled
    && (e.tagName === "TEXTAREA" || [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim())));
  return shown.map((e) => [lit(getComputedStyle(e).color), lit(behind(e))])
    .map(([a, b]) => (Math.max(a, b) + .05) / (Math.min(a, b) + .05)).reduce((a, b) => Math.min(a, b));
})()
