/* Draws the formulas of the pages as MathML, which browsers know by themselves: no library, and
   nothing is fetched. A formula is written as in the docstrings, in Unicode with _ and ^ as in TeX,
   and reads as that where scripts are off. Two spaces part two formulas on one line. */

const SUPERSCRIPTS = { "ᵀ": ["mi", "T"], "²": ["mn", "2"], "³": ["mn", "3"], "′": ["mo", "′"],
  "⁻¹": ["mn", "−1"], "⁺": ["mo", "+"] };
const ACCENTS = { "\u0302": "^", "\u0303": "~", "\u0304": "¯" };
const LARGE = new Set(["∑", "max", "min"]); // their index goes below, where there is room
const TOKEN = /\s+|[A-Za-z]\p{M}|[A-Za-z]+|\d+(?:\.\d+)?|⁻¹|:=|.\p{M}?/gu;

function tag(name, content, attributes = "") {
  return `<${name}${attributes}>${content}</${name}>`;
}

function escaped(text) {
  return text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
}

function symbol(token, prefix) {
  const [base, accent] = [...token];
  if (accent in ACCENTS) {
    return tag("mover", tag("mi", base) + tag("mo", ACCENTS[accent]), ' accent="true"');
  }
  if (/^\d|½/.test(token)) return tag("mn", token);
  if (/^[\p{L}∞∇∂∅]/u.test(token)) {
    return tag("mi", token, /^[TΣΛΦΨΓ]$/u.test(token) ? ' mathvariant="normal"' : "");
  }
  const close = /[/|‖()[\]⟨⟩]/.test(token) ? ' lspace="0" rspace="0" stretchy="false"' : "";
  const form = prefix ? ' form="prefix"' : /=$/.test(token) ? ' form="infix"' : "";
  return tag("mo", escaped(token), close + form);
}

function parse(text) {
  const tokens = text.normalize("NFD").match(TOKEN);

  function argument() { // what follows _ or ^ or √: a group in braces, or one character
    if (tokens[0] === "{") {
      tokens.shift();
      return row("}");
    }
    const [first, ...rest] = tokens.shift();
    if (/\p{M}/u.test(rest[0] ?? "")) return symbol(first + rest.shift());
    if (rest.length) tokens.unshift(rest.join(""));
    return symbol(first);
  }

  function row(end) {
    const parts = [];
    let space = false;
    let afterWord = false;
    let afterOperator = true;
    while (tokens.length) {
      const token = tokens.shift();
      if (token === end) break;
      if (!token.trim()) {
        space = parts.length > 0;
        continue;
      }
      const word = /^[A-Za-z]{2}/.test(token);
      if (word && end === "}") { // an index holds letters, not words
        tokens.unshift(...token);
        continue;
      }
      if (space && (word || afterWord) && !afterOperator && !/^[=,)]/.test(token)) {
        parts.push('<mspace width="0.25em"/>');
      }
      let base;
      if (token === "√") {
        if (tokens[0] === "(") tokens[0] = "{";
        base = tag("msqrt", tokens[0] === "{" ? (tokens.shift(), row(")")) : argument());
      } else {
        base = symbol(token, afterOperator && /[−±]/.test(token));
      }
      let below = "";
      let above = "";
      for (;;) {
        if (tokens[0] === "_") {
          tokens.shift();
          below = tag("mrow", argument());
        } else if (tokens[0] === "^") {
          tokens.shift();
          above += argument();
        } else if (tokens[0] in SUPERSCRIPTS) {
          const [name, content] = SUPERSCRIPTS[tokens.shift()];
          above += tag(name, content, ' mathvariant="normal"');
        } else {
          break;
        }
      }
      if (above) above = tag("mrow", above);
      const [under, over, both] = LARGE.has(token)
        ? ["munder", "mover", "munderover"] : ["msub", "msup", "msubsup"];
      if (below && above) base = tag(both, base + below + above);
      else if (below) base = tag(under, base + below);
      else if (above) base = tag(over, base + above);
      parts.push(base);
      space = false;
      afterWord = word;
      afterOperator = /^[^\p{L}\d)\]‖|]/u.test(token);
    }
    return tag("mrow", parts.join(""));
  }

  return row(null);
}

function draw() {
  for (const element of document.querySelectorAll(".arithmatex")) {
    const block = element.tagName === "DIV";
    const style = block ? ' displaystyle="true"' : "";
    const formulas = element.textContent.trim().split(/\s{2,}/);
    element.innerHTML = formulas.map((formula) => {
      const [first, ...others] = block ? formula.split(/ (?== )/) : [formula];
      const [second, ...rest] = others; // a long chain may break, but not at its first =
      const lines = [second ? `${first} ${second}` : first, ...rest];
      return tag("span", lines.map((line) => tag("math", parse(line), style)).join(" "));
    }).join(" ");
    const next = element.nextSibling;
    const stop = !block && /^[.,;:)]+/.exec(next?.data ?? "");
    if (stop) { // punctuation stays on the formula's line
      element.append(stop[0]);
      next.data = next.data.slice(stop[0].length);
    }
  }
}

if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", draw);
else draw();
