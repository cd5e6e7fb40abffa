// What both widgets need from whoever shows them: bytes, colours, elements, keys, clean-up.
// Joined in front of live_map.js and token_stepper.js by module.py, so that each of them reaches
// the browser as one ES module that runs unchanged in JupyterLab (anywidget) and in Panel.

// Hosts hand bytes over as a DataView, an ArrayBuffer or a typed array.
function bytesOf(value) {
  if (value instanceof ArrayBuffer) return new DataView(value);
  if (ArrayBuffer.isView(value)) {
    return new DataView(value.buffer, value.byteOffset, value.byteLength);
  }
  return new DataView(new ArrayBuffer(0));
}

function parsed(text) {
  try {
    return JSON.parse(text || "null");
  } catch {
    return null;
  }
}

// Make an element; text stays text, whatever a model wrote. An attribute of false or null is left
// out, one that is a function listens.
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(name, value);
    else if (value !== null && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

// JupyterLab looks for this attribute on the focused element itself before it takes a key.
const KEYS_ARE_OURS = { "data-lm-suppress-shortcuts": "true" };

// A button that leaves the focus where it is, so that the arrow keys go on working.
function button(label, key, attributes) {
  const hint = key ? [element("kbd", { "aria-hidden": "true" }, key)] : [];
  return element(
    "button",
    { type: "button", ...KEYS_ARE_OURS, mousedown: (event) => event.preventDefault(), ...attributes },
    label, ...hint,
  );
}

function helpPanel(title, intro, keys) {
  const list = element("dl");
  for (const [names, does] of keys) {
    const keycaps = names.map((name) => element("kbd", {}, name));
    list.append(element("dt", {}, ...keycaps), element("dd", {}, does));
  }
  const paragraphs = intro.map((text) => element("p", {}, text));
  return element(
    "div", { class: "trw-help", role: "note", "aria-label": title, hidden: true },
    element("h3", {}, title), ...paragraphs, list,
  );
}

// Set several properties of the model, those that changed only.
function keep(model, values) {
  const changed = Object.entries(values).filter(([name, value]) => model.get(name) !== value);
  for (const [name, value] of changed) model.set(name, value);
  if (changed.length) model.save_changes();
}

// Follow properties of the model and things of the page until `stop` is called.
function listener(model) {
  const undo = [];
  return {
    model(names, call) {
      for (const name of names) {
        model.on(`change:${name}`, call);
        undo.push(() => model.off(`change:${name}`, call));
      }
    },
    page(target, name, call) {
      target.addEventListener(name, call);
      undo.push(() => target.removeEventListener(name, call));
    },
    observer(made) {
      undo.push(() => made.disconnect());
      return made;
    },
    stop() {
      for (const call of undo.splice(0)) call();
    },
  };
}

// Light or dark: what the model says, else JupyterLab's mark, else the nearest background behind
// the widget, else what the reader's system prefers.
function themeOf(model, root) {
  const wanted = model.get("theme");
  if (wanted === "light" || wanted === "dark") return wanted;
  const lab = document.body.dataset.jpThemeLight;
  if (lab !== undefined) return lab === "false" ? "dark" : "light";
  for (let node = root.parentNode; node; node = node.parentNode ?? node.host) {
    const light = node instanceof Element ? luminance(getComputedStyle(node).backgroundColor) : null;
    if (light !== null) return light < 0.5 ? "dark" : "light";
  }
  return matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
}

function luminance(css) {
  const [r, g, b, alpha = 1] = (css.match(/[\d.]+/g) ?? []).map(Number);
  if (b === undefined || alpha < 0.1) return null;
  return (0.2126 * r + 0.7152 * g + 0.0722 * b) / 255;
}

// Keep root.dataset.theme right, and say when it changed.
function followTheme(model, root, listen, changed) {
  const look = () => {
    const theme = themeOf(model, root);
    if (root.dataset.theme === theme) return;
    root.dataset.theme = theme;
    changed();
  };
  const marks = listen.observer(new MutationObserver(look));
  const filter = { attributes: true, attributeFilter: ["class", "style", "data-theme", "data-jp-theme-light"] };
  marks.observe(document.body, filter);
  marks.observe(document.documentElement, filter);
  listen.page(matchMedia("(prefers-color-scheme: dark)"), "change", look);
  listen.model(["theme"], look);
  look();
  return look;
}

const limited = (value, low, high) => Math.min(high, Math.max(low, value));
