// Fills a skeleton with values, says what was drawn and what the reader did. See page.py.

const QUIET_MS = 2000; // this long without a beat: ask whether the server still answers
const LOST_MS = 5000; // this long, and it may hang
const RETRY_MS = 1000;
const FORGET_MS = 1000; // changes reach Python after 50 ms
const KEYS = { ArrowLeft: "left", ArrowRight: "right", Home: "home", End: "end", Escape: "escape" };
const CHILD_KEYS = /^(Arrow(Left|Right|Up|Down)|Home|End| |t)$/;
const CHILDREN = ["figure", "second"];

function render({ model, el }) {
  const root = document.createElement("div");
  root.className = "screen"; // Panel calls its own element after the Python class
  let built = null; // the skeleton that stands
  let bindings = [];
  let actions = []; // the last few: changes within 50 ms reach Python as one
  let count = 0;
  let top; // where in its course the page stands
  let lastBeat = performance.now();

  // How high the place of a plot is, for plots that cannot find out by themselves.
  const sizes = new ResizeObserver((entries) => {
    for (const { target, contentRect } of entries) {
      const height = Math.floor(contentRect.height / 4) * 4;
      if (height > 0) send("height", [target.dataset.size, height]);
    }
  });

  const send = (name, value) => {
    actions = [...actions.slice(-7), [++count, name, value]];
    model.set("actions", actions);
    model.save_changes();
  };

  // What was typed as a secret is kept nowhere once it has arrived.
  const forget = (number) => setTimeout(() => {
    actions = actions.map((action) => (action[0] === number ? [number, action[1], null] : action));
    model.set("actions", actions);
    model.save_changes();
  }, FORGET_MS);

  const build = () => {
    built = model.get("skeleton");
    root.innerHTML = built;
    bindings = [];
    for (const element of root.querySelectorAll("*")) {
      for (const { name, value } of [...element.attributes]) {
        if (name === "data-bind") bindings.push([element, null, value]);
        else if (name.startsWith("data-bind-")) bindings.push([element, name.slice(10), value]);
      }
    }
    for (const name of CHILDREN) place(name);
    // A child that had no place before has not been drawn yet.
    if (root.isConnected) model.view.render_children();
    for (const element of root.querySelectorAll("[data-send]")) {
      const kind = /^(SELECT|INPUT|TEXTAREA)$/.test(element.tagName) ? "change" : "click";
      element.addEventListener(kind, () => {
        remember(element);
        send(element.dataset.send, element.value);
      });
    }
    for (const form of root.querySelectorAll("form[data-form]")) {
      form.addEventListener("submit", (event) => {
        event.preventDefault();
        send(form.dataset.form, Object.fromEntries(new FormData(form)));
        const secrets = form.querySelectorAll('input[type="password"]');
        for (const field of secrets) field.value = "";
        if (secrets.length) forget(count);
        taker()?.focus({ preventScroll: true });
      });
    }
    sizes.disconnect();
    for (const element of root.querySelectorAll("[data-size]")) sizes.observe(element);
    for (const element of root.querySelectorAll("[data-open]")) {
      element.addEventListener("click", () => show(element.dataset.open));
    }
    for (const element of root.querySelectorAll("[data-swap]")) {
      element.addEventListener("click", (event) => {
        event.preventDefault();
        swapTheme();
      });
    }
    for (const element of root.querySelectorAll(".scroll")) {
      element.addEventListener("scroll", () => markMore(element), { passive: true });
    }
    dress();
    fill();
    // Another place in the page's course begins at its top, wherever the reader was before.
    const now = root.querySelector("[data-top]")?.dataset.top;
    if (top !== undefined && now !== top) window.scrollTo(0, 0);
    top = now;
  };

  // The other theme, where the reader is: nothing is loaded anew.
  const swapTheme = () => {
    const theme = otherTheme();
    document.documentElement.dataset.theme = theme;
    addressed({ theme });
    dress();
    send("theme", theme);
  };

  const otherTheme = () => (document.documentElement.dataset.theme === "dark" ? "light" : "dark");

  // Links lead to pages in the theme that is on; the button names the other one.
  const dress = () => {
    const [theme, other] = [otherTheme() === "dark" ? "light" : "dark", otherTheme()];
    for (const link of root.querySelectorAll('a[href*="theme="]:not([data-swap])')) {
      const url = new URL(link.getAttribute("href"), location.href);
      url.searchParams.set("theme", theme);
      link.setAttribute("href", url.href);
    }
    for (const link of root.querySelectorAll("[data-swap]")) {
      link.setAttribute("href", `?theme=${other}`);
      link.setAttribute("title", `Change to the ${other} theme (d)`);
      link.textContent = other[0].toUpperCase() + other.slice(1);
    }
  };

  // Say that there is more below, also where no scroll bar is drawn.
  const markMore = (element) => {
    element.toggleAttribute("data-more", element.scrollHeight - element.scrollTop - element.clientHeight > 4);
  };

  const place = (name) => {
    const child = model.get_child(name);
    if (!child) return;
    // Panel draws the children it has seen asked for; its anywidget adapter does not note them.
    const asked = model.view.accessed_children;
    if (!asked.includes(name)) asked.push(name);
    root.querySelector(`[data-child="${name}"]`)?.replaceChildren(child);
  };

  const dialog = (name) => root.querySelector(`dialog[data-name="${name}"]`);

  // Focus goes to the button at a long dialog's end; reading begins at its head.
  const show = (name) => {
    const shown = dialog(name);
    if (!shown || shown.open) return;
    shown.showModal();
    shown.scrollTop = 0;
  };

  const fill = () => {
    // A change that arrives while the page is being put up may not be told of.
    if (model.get("skeleton") !== built) return build();
    const values = model.get("values");
    for (const [element, attribute, key] of bindings) {
      if (!(key in values)) continue;
      const value = values[key];
      if (attribute === null) {
        const text = value === null ? "" : String(value);
        if (element.textContent !== text) element.textContent = text;
      } else if (attribute === "value") {
        if (element.value !== value && root.getRootNode().activeElement !== element) {
          element.value = value;
        }
      } else if (value === null || value === false) {
        element.removeAttribute(attribute);
      } else if (element.getAttribute(attribute) !== String(value)) {
        element.setAttribute(attribute, value === true ? "" : value);
      }
    }
    if (values.address) addressed(values.address);
    root.querySelectorAll(".scroll").forEach(markMore);
    lastBeat = performance.now();
    root.removeAttribute("data-lost");
    if (values.beat) {
      model.set("drawn", values.beat);
      model.set("built", Number(/^<!-- (\d+) -->/.exec(built)?.[1] ?? 0));
      model.save_changes();
    }
  };

  // A page may keep more there: name -> text, or null for what need not be said.
  const addressed = (wanted) => {
    const url = new URL(location.href);
    for (const [name, value] of Object.entries(wanted)) {
      if (value === null) url.searchParams.delete(name);
      else url.searchParams.set(name, value);
    }
    if (url.href !== location.href) history.replaceState(null, "", url);
  };

  // The address holds the view: a control with data-url keeps its value there.
  const remember = (element) => {
    if (!("url" in element.dataset)) return;
    const url = new URL(location.href);
    url.searchParams.set(element.dataset.send, element.value);
    history.replaceState(null, "", url);
  };

  const press = (name) => {
    const element = root.querySelector(`[data-key="${name}"]:not([hidden])`);
    element?.click();
    return element;
  };

  // A page may have a child that keys belong to: what takes them there.
  const taker = () => {
    const child = root.querySelector("[data-keys]")?.firstElementChild;
    return (child?.shadowRoot ?? child)?.querySelector('[role="application"]');
  };

  const onKey = (event) => {
    const target = event.composedPath()[0];
    // A closed dialog may still hold the focus for a moment.
    const typing = /^(INPUT|SELECT|TEXTAREA|BUTTON|A|SUMMARY)$/.test(target?.tagName ?? "")
      && !target.closest("dialog:not([open])");
    if (event.ctrlKey || event.metaKey || event.altKey || root.querySelector("dialog[open]")) return;
    if (event.key === "?") show("help");
    else if (/^(INPUT|TEXTAREA|SELECT)$/.test(target?.tagName ?? "")
      && !(target.type === "radio" && /^[a-z0-9]$/.test(event.key))) return;
    else if (CHILD_KEYS.test(event.key) && !(typing && event.key === " ") && taker()) {
      const { key, shiftKey } = event;
      taker().focus({ preventScroll: true });
      // Not composed: it ends at the child, so that it does not come back here.
      taker().dispatchEvent(new KeyboardEvent("keydown", { key, shiftKey, bubbles: true, cancelable: true }));
    } else if (event.key === " ") {
      if (typing || !press("space")) return;
    } else if (!press(KEYS[event.key] ?? (/^[a-z0-9]$/.test(event.key) ? event.key : "none"))) return;
    event.preventDefault();
  };
  document.addEventListener("keydown", onKey);

  // A click on a control leaves the focus where it is, or takes it out of a field that was filled
  // in, so that keys go on to mean the same on the whole page.
  root.addEventListener("mousedown", (event) => {
    const control = event.composedPath()[0].closest?.("button, summary, a.button");
    if (!control || control.closest("dialog")) return;
    event.preventDefault();
    const active = root.getRootNode().activeElement;
    if (/^(INPUT|SELECT|TEXTAREA)$/.test(active?.tagName ?? "")) active.blur();
  });

  // When the dashboard's process has ended nobody else can say so; when it is back, start anew.
  const watch = setInterval(async () => {
    const silent = () => performance.now() - lastBeat;
    if (silent() < QUIET_MS) return;
    if (silent() >= LOST_MS) root.setAttribute("data-lost", "");
    try {
      const answer = await fetch("alive", { cache: "no-store" });
      if (answer.ok && silent() >= LOST_MS) location.reload();
    } catch {
      root.setAttribute("data-lost", ""); // nobody answers there
    }
  }, RETRY_MS);

  model.on("change:skeleton", build);
  model.on("change:values", fill);
  el.append(root);
  build();
  return () => {
    clearInterval(watch);
    sizes.disconnect();
    document.removeEventListener("keydown", onKey);
    root.remove();
  };
}

export default { render };
