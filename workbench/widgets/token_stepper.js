// The token stepper: a text as tokens, and the way of the token in focus through the MoE layers.
//
// Properties: state (JSON, laid out by steps.py), token, layer (places in it), stage ("gate" |
// "select" | "place" | "experts" | "combine"), view ("picture" | "table"), theme. Everything
// shown is in the state; text and picture follow one focus.

const STAGES = {
  gate: ["Gate", "one logit per expert"],
  select: ["Select", "the best experts"],
  place: ["Place", "which copy, which device"],
  experts: ["Run", "send, compute"],
  combine: ["Combine", "weigh and add"],
};
const ORDER = Object.keys(STAGES);
const NUMBER_PX = 34; // a bar this wide carries its number,
const ROLE_PX = 66; // this wide also its role in words, narrower ones in short
const LABEL_PX = 26; // labels of narrow bars keep this distance
const MARGIN_PX = 100; // the width of the margin's label
const MARGIN_PART = 12; // and its height, in per cent of the picture's
const KEYS = [
  [["←", "→"], "the token before, the next token"],
  [["↑", "↓"], "the layer above, the layer below"],
  [["Space"], "next stage, then next layer, then next token; with Shift back"],
  [["Home", "End"], "first, last token"],
  [["t"], "table of the same numbers, and back"],
  [["Esc"], "close this"],
  [["?"], "show this"],
];

function render({ model, el }) {
  const listen = listener(model);
  const aside = element("span", { class: "trw-aside" });
  const tableButton = button("Table", "t", { click: () => swapView() });
  const helpButton = button("", "?", { "aria-label": "Keys and meaning", click: () => showHelp() });
  const text = element("div", { class: "trw-text", role: "listbox", "aria-label": "Tokens" });
  const hint = element("p", { class: "trw-hint" });
  const facts = element("div", { class: "trw-facts" });
  const path = element("div", { class: "trw-path" });
  const tabs = element("ol", { class: "trw-stages" });
  const said = element("p", { class: "trw-said", role: "status", "aria-live": "polite" });
  const picture = element("div", { class: "trw-figure" });
  const source = element("div", { class: "trw-source" });
  const body = element(
    "div", {
      class: "trw-body", tabindex: "0", ...KEYS_ARE_OURS, role: "application",
      "aria-label": "Token stepper. Left and right choose a token, up and down a layer, Space goes to the next stage, ? explains.",
    },
    text, hint, facts,
    element("div", { class: "trw-columns" }, path, element("div", { class: "trw-detail" }, tabs, said, picture, source)),
  );
  const help = helpPanel("How to read this", [
    "Every token passes every layer. In each MoE layer a gate scores all experts and the best few run.",
    "The small numbers under a token are its experts in the layer in focus; bold ones it shares with the "
    + "token before it. A dot marks tokens whose whole decision was recorded; of the others there is a compact "
    + "record: experts, weights and margin, without logits and scores.",
    "Logits become scores (by a softmax, in most models), the best scores are chosen, and a chosen expert’s weight "
    + "is its score, in most models divided by the sum of the chosen ones. What holds here stands under the bars.",
    "Physical 3 is the third-numbered copy of an expert in the routing table: an expert may have several. Pairs "
    + "such as E8 88 are the bytes, in hex, of a character that was cut into several tokens.",
  ], KEYS);
  const root = element(
    "div", { class: "trw trw-stepper" },
    element("div", { class: "trw-head" }, element("h2", {}, "Token stepper"), aside,
      element("div", { class: "trw-tools" }, tableButton, helpButton)),
    body, help,
  );
  el.append(root);

  let state = null;
  let chips = [];
  let recorded = ""; // how much of the request, in words
  let width = 600;
  let drawn = ""; // what the screen shows, so that one change draws once

  // ---- the focus

  const layers = () => state?.engine.layers ?? [];

  function focus() {
    const last = Math.max(0, (state?.tokens.length ?? 0) - 1);
    return {
      token: limited(model.get("token"), 0, last),
      layer: limited(model.get("layer"), 0, Math.max(0, layers().length - 1)),
      stage: ORDER.includes(model.get("stage")) ? model.get("stage") : ORDER[0],
    };
  }

  function go(change) {
    keep(model, { ...focus(), ...change });
    show();
  }

  // The next stop on the whole way: stage, then layer, then token. At either end it stays.
  function walk(by) {
    const { token, layer, stage } = focus();
    const [stages, depth] = [ORDER.length, layers().length];
    const at = (token * depth + layer) * stages + ORDER.indexOf(stage) + by;
    if (at < 0 || at >= state.tokens.length * depth * stages) return;
    const place = Math.floor(at / stages);
    go({ token: Math.floor(place / depth), layer: place % depth, stage: ORDER[at % stages] });
  }

  function onKey(event) {
    if (event.altKey || event.metaKey || event.ctrlKey) return;
    const { token, layer } = focus();
    const last = (state?.tokens.length ?? 1) - 1;
    const onButton = event.composedPath()[0].tagName === "BUTTON";
    if (event.key === "?") showHelp();
    else if (event.key === "Escape" && !help.hidden) showHelp(false);
    else if (event.key === "t") swapView();
    else if (!state || !layers().length) return;
    else if (event.key === " " && !onButton) walk(event.shiftKey ? -1 : 1);
    else if (event.key === "ArrowLeft") go({ token: Math.max(0, token - 1) });
    else if (event.key === "ArrowRight") go({ token: Math.min(last, token + 1) });
    else if (event.key === "ArrowUp") go({ layer: Math.max(0, layer - 1) });
    else if (event.key === "ArrowDown") go({ layer: Math.min(layers().length - 1, layer + 1) });
    else if (event.key === "Home") go({ token: 0 });
    else if (event.key === "End") go({ token: last });
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  function showHelp(wanted = help.hidden) {
    help.hidden = !wanted;
    helpButton.setAttribute("aria-expanded", String(wanted));
  }

  function swapView() {
    keep(model, { view: isTable() ? "picture" : "table" });
    show();
  }

  const isTable = () => model.get("view") === "table";

  // ---- drawing

  function readState() {
    state = parsed(model.get("state"));
    drawn = "";
    chips = [];
    text.replaceChildren();
    const { request, engine, note, tokens } = state ?? {};
    aside.textContent = state
      ? [`request ${request.id}`, DOMAINS[request.label] ?? request.label, engine.model, `top-${engine.top_k} of ${engine.num_experts} experts`,
        `${engine.num_devices} device${engine.num_devices === 1 ? "" : "s"}`, note].filter(Boolean).join(" · ")
      : "";
    (tokens ?? []).forEach((token, at) => {
      const full = token.layers.some((layer) => layer.full);
      const chip = element(
        "span", {
          class: "trw-chip", role: "option", "data-kind": token.kind, "data-at": at, "data-full": String(full), title: `${token.note ? `${token.note} · ` : ""}id ${token.id}`,
          click: () => go({ token: at }),
        },
        element("span", { class: "trw-token" }, token.text), element("span", { class: "trw-ids" }),
      );
      const before = tokens[at - 1];
      if (token.generated && before && before.generated === false) {
        text.append(element("span", { class: "trw-divider", title: "what follows was generated" }, "▸ generated"));
      }
      chips.push(chip);
      text.append(chip);
      if (token.breaks) text.append(element("span", { class: "trw-break" }));
    });
    recorded = recordedWords(tokens ?? []);
    show();
  }

  function show() {
    const at = focus();
    width = picture.clientWidth || width; // 0 while the page has no layout
    const now = JSON.stringify([at, isTable(), width]);
    if (now === drawn) return;
    drawn = now;
    Object.assign(root.dataset, { token: at.token, layer: at.layer, stage: at.stage });
    tableButton.setAttribute("aria-pressed", String(isTable()));
    const token = state?.tokens[at.token];
    if (!token || !layers().length) {
      for (const part of [hint, facts, path, tabs, picture, source]) part.replaceChildren();
      said.textContent = !state ? "Waiting for a recorded request."
        : !token ? "This request has no recorded tokens." : "This model is dense: it has no MoE layer to step through.";
      return;
    }
    const before = state.tokens[at.token - 1];
    const stop = {
      ...at, record: token.layers[at.layer], who: token, engine: state.engine,
      name: state.engine.layers[at.layer], full: token.layers[at.layer].full,
      recorded,
      before: before?.position === token.position - 1 ? before : null,
      width,
    };
    showChips(stop);
    showFacts(stop);
    showPath(stop);
    showTabs(stop);
    said.replaceChildren(...sentence(stop));
    picture.replaceChildren(...(isTable() ? [numbersTable(stop)] : PICTURES[stop.stage](stop)));
    picture.classList.toggle("trw-table", isTable());
    showSource(stop);
  }

  function showChips({ token, layer, engine }) {
    chips.forEach((chip, at) => {
      const { topk_ids: ids } = state.tokens[at].layers[layer];
      const before = at && state.tokens[at].layers[layer].kept !== null ? state.tokens[at - 1].layers[layer].topk_ids : [];
      const kept = ids.filter((id) => before.includes(id)).length;
      const words = engine.top_k > 4
        ? [element(kept ? "b" : "span", {}, at && before.length ? `${kept}/${engine.top_k}` : "·")]
        : ids.map((id) => element(before.includes(id) ? "b" : "span", {}, id < 0 ? "–" : String(id)));
      chip.lastChild.replaceChildren(...words);
      chip.setAttribute("aria-selected", String(at === token));
      chip.setAttribute("aria-label", `token ${state.tokens[at].position}: ${state.tokens[at].text}`);
    });
    const cap = (key) => element("kbd", {}, key);
    hint.replaceChildren(
      element("span", {}, cap("←"), cap("→"), " token"), element("span", {}, cap("↑"), cap("↓"), " layer"),
      element("span", {}, cap("Space"), " next stage"),
      element("span", { class: "trw-meaning" }, engine.top_k > 4
        ? `below each token: how many experts it shares with the token before, in layer ${engine.layers[layer]}`
        : `below each token: its experts in layer ${engine.layers[layer]}, `,
        ...(engine.top_k > 4 ? [] : [element("b", {}, "bold"), " if the token before used them too"]),
        " · ", element("b", {}, "●"), " recorded in full"),
    );
    const [box, line] = [chips[token].getBoundingClientRect(), text.getBoundingClientRect()];
    if (box.top < line.top) text.scrollTop -= line.top - box.top + 8;
    if (box.bottom > line.bottom) text.scrollTop += box.bottom - line.bottom + 8;
    markMore();
  }

  // Say that the text goes on below, also where no scroll bar is drawn.
  function markMore() {
    text.toggleAttribute("data-more", text.scrollHeight - text.scrollTop - text.clientHeight > 12);
  }

  function showFacts({ who }) {
    const origin = who.generated === null ? "" : who.generated ? "generated" : "from the prompt";
    const again = who.runs > 1 ? `ran ${who.runs} times (${who.cause === "accepted" ? "once more after preemption" : who.cause})` : "";
    const words = [`id ${who.id}`, who.note, origin, `attention on device ${who.home}`, `step ${who.step}`, again];
    facts.replaceChildren(
      element("span", { class: "trw-which" }, `Token ${who.position}`),
      element("span", { class: "trw-name", "data-kind": who.kind }, who.text),
      element("span", { class: "trw-aside" }, words.filter(Boolean).join(" · ")),
    );
  }

  // All layers at once: where this token went, and where the one before it had gone.
  function showPath({ who, layer: here, before, engine }) {
    const cell = 100 / engine.num_experts;
    const named = (path.clientWidth || 300) - 160 >= 14 * engine.num_experts;
    const rows = who.layers.map((record, at) => {
      const earlier = before?.layers[at].topk_ids ?? [];
      const marks = record.topk_ids.map((id, rank) => id < 0 ? null : element(
        "span", { class: `trw-mark ${rank ? "" : "trw-first"}`, style: `left: ${id * cell}%; width: ${cell}%`, title: `expert ${id}, choice ${rank + 1}` },
        named ? String(id) : "",
      ));
      const rings = earlier.filter((id) => id >= 0).map((id) => element(
        "span", { class: "trw-ring", style: `left: ${(id + 0.5) * cell}%`, title: `expert ${id}: the token before` },
      ));
      return element(
        "div", { class: "trw-lane", "aria-current": at === here ? "true" : null, click: () => go({ layer: at }) },
        element("span", { class: "trw-lane-name" }, `layer ${engine.layers[at]}`),
        element("span", {
          class: "trw-track",
          style: engine.num_experts <= 64 ? `--cell: ${cell}%` : "--cell: 100%",
        }, ...marks, ...rings),
        element("span", { class: "trw-kept" }, keptWord(record.kept, engine.top_k)),
      );
    });
    const lanes = element("div", { class: "trw-lanes" }, ...rows);
    path.replaceChildren(
      element("h3", {}, "Experts, layer by layer"), lanes,
      element("div", { class: "trw-key" },
        element("span", { class: "trw-mark trw-first" }), "first choice",
        ...(engine.top_k > 1 ? [element("span", { class: "trw-mark" }), engine.top_k > 2 ? "next choices" : "second"] : []),
        element("span", { class: "trw-ring" }), "token before"),
      neighbours({ who, here, before, engine }),
    );
    const row = rows[here];
    if (row.offsetTop < lanes.scrollTop) lanes.scrollTop = row.offsetTop - 4;
    const end = row.offsetTop + row.offsetHeight;
    if (end > lanes.scrollTop + lanes.clientHeight) lanes.scrollTop = end - lanes.clientHeight + 4;
  }

  function showTabs({ stage }) {
    tabs.replaceChildren(...ORDER.map((name, at) => element(
      "li", {}, button(`${at + 1} ${STAGES[name][0]}`, "", {
        "aria-current": name === stage ? "step" : null, title: STAGES[name][1], click: () => go({ stage: name }),
      }),
    )));
  }

  function showSource({ full, stage, who, engine }) {
    const lines = full?.source[stage] ?? [];
    source.replaceChildren(
      ...lines.map((line) => element("code", {}, line)),
      element("span", {}, [
        `routing table v${who.table_version}`, full ? `experts in ${full.format}` : `engine in ${engine.dtype}`,
        full ? "● recorded in full" : "○ compact record",
      ].join(" · ")),
    );
  }

  listen.page(root, "keydown", onKey);
  listen.page(text, "scroll", markMore);
  listen.page(root, "mousedown", (event) => {
    // A click anywhere on it makes the keys work; selecting text with the mouse still does.
    if (!event.composedPath().some((node) => node.tagName === "BUTTON")) body.focus({ preventScroll: true });
  });
  listen.observer(new ResizeObserver(show)).observe(picture);
  listen.model(["state"], readState);
  listen.model(["token", "layer", "stage", "view"], show);
  const look = followTheme(model, root, listen, () => {});
  requestAnimationFrame(look);
  readState();

  return () => {
    listen.stop();
    root.remove();
  };
}

// ---- words

const figure = (value, digits = 3) => (value === null || value === undefined ? "not finite" : value.toFixed(digits));
const listed = (words) => (words.length < 2 ? words.join("") : `${words.slice(0, -1).join(", ")} and ${words.at(-1)}`);
const strong = (words) => element("b", {}, words);

function recordedWords(tokens) {
  const places = tokens.flatMap((token, at) => (token.layers.some((layer) => layer.full) ? [at] : []));
  const count = places.length;
  if (!count) return "No token of this request was recorded in full.";
  const from = places.at(-1) === count - 1 ? "the first " : "";
  return `Only ${from}${count} token${count === 1 ? "" : "s"} of this request ${count === 1 ? "was" : "were"} recorded in full.`;
}

function keptWord(kept, top_k) {
  if (kept === null) return "";
  return kept === top_k ? "kept" : kept === 0 ? "jumped" : `${kept} of ${top_k} kept`;
}

function sentence(stop) {
  const { stage, full, record, who, name, engine, recorded } = stop;
  const chosen = record.topk_ids.filter((id) => id >= 0);
  const head = [strong(who.text), ` in layer ${name}: `];
  const lacking = `Its ${stage === "gate" ? "logits" : "scores"} were not kept, only which experts ran, with what weight and where. `
    + recorded;
  if (stage === "gate") {
    if (!full) return [...head, lacking];
    const best = full.logits.indexOf(Math.max(...full.logits.filter((value) => value !== null)));
    return [...head, `the gate gives each of the ${engine.num_experts} experts a logit. The highest is expert ${best}’s, ${figure(full.logits[best])}.`];
  }
  if (stage === "select") {
    if (!full) return [...head, `chosen: ${listed(chosen.map((id) => `expert ${id}`))}${record.margin === null ? "" : `, by a margin of ${figure(record.margin)}`}. `, lacking];
    const words = listed(chosen.map((id) => `expert ${id} (${figure(full.scores[id])})`));
    const next = full.runner_up < 0 ? "No other expert was left."
      : `Expert ${full.runner_up} (${figure(full.scores[full.runner_up])}) missed by ${figure(record.margin)}: the margin.`;
    return [...head, `the ${chosen.length} best scores win: ${words}. ${next}`];
  }
  if (stage === "place") {
    return [...head, `routing table v${who.table_version} says which physical copy serves each chosen expert, and so which device.`];
  }
  if (stage === "experts") {
    if (!record.devices) return [...head, "the devices under this routing table were not recorded."];
    const away = [...new Set(record.devices)].filter((device) => device !== who.home);
    const format = full ? ` The experts compute in ${full.format}.` : "";
    const trip = away.length ? `its vector is sent from device ${who.home} to device ${listed(away.map(String))}.`
      : `its experts are on its own device, ${who.home}: nothing is sent.`;
    return [...head, trip + format];
  }
  const out = "each expert’s output is multiplied by its weight, and the products are added.";
  if (full?.weighed !== "shares" || chosen.length < 2) return [...head, out];
  const sum = chosen.map((id) => figure(full.scores[id])).join(" + ");
  return [...head, out, ` The weight of expert ${chosen[0]} is ${figure(full.scores[chosen[0]])} ÷ (${sum}) = ${figure(record.topk_weights[0])}.`];
}

// ---- pictures, one for each stage

const PICTURES = {
  gate: (stop) => (stop.full ? [bars(stop, stop.full.logits, {})] : [missing("logits"), weightBars(stop)]),
  select: (stop) => (stop.full ? [bars(stop, stop.full.scores, { margin: true })] : [missing("scores"), weightBars(stop)]),
  place: (stop) => [element("div", { class: "trw-places" }, ...choices(stop).map(({ id, at }) => placed(stop, id, at)))],
  experts: (stop) => (stop.record.devices ? [deviceBoxes(stop)] : [missing("devices")]),
  combine: (stop) => [weightBars(stop), equation(stop)],
};

const choices = ({ record }) => record.topk_ids.map((id, at) => ({ id, at })).filter(({ id }) => id >= 0);

function missing(what) {
  return element("div", { class: "trw-missing" }, `○ No ${what} in the compact record of this token`);
}

// One bar per expert, always in the order of the experts, so that the eye can follow one.
function bars({ record, full, engine, width }, values, { margin }) {
  const finite = values.filter((value) => value !== null);
  const low = Math.min(0, ...finite);
  const span = Math.max(1e-9, Math.max(0, ...finite) - low);
  const height = (value) => (100 * value) / span;
  const room = width / engine.num_experts;
  const few = room >= NUMBER_PX;
  const labelled = few ? values.map((_, id) => id) : spaced([...record.topk_ids, full.runner_up], room);
  const columns = values.map((value, id) => {
    const rank = record.topk_ids.indexOf(id);
    const role = rank >= 0 ? "chosen" : id === full.runner_up ? "next" : "rest";
    const up = value === null || value >= 0;
    const style = value === null ? "" : up
      ? `bottom: ${height(-low)}%; height: ${height(value)}%`
      : `top: ${height(low + span)}%; height: ${height(-value)}%`;
    const label = few ? element("span", {
      class: `trw-number ${up ? "" : "trw-below"}`,
      style: value === null ? "bottom: 0" : up ? `bottom: ${height(value - low)}%` : `top: ${height(low + span - value)}%`,
    }, value === null ? "–" : figure(value, 2)) : null;
    const tag = labelled.includes(id) ? String(id) : "";
    const word = rank >= 0 ? `choice ${rank + 1}` : role === "next" ? "runner-up" : "";
    const short = rank >= 0 ? ["1st", "2nd", "3rd"][rank] ?? `${rank + 1}th` : role === "next" ? "next" : "";
    return element(
      "div", { class: `trw-column trw-${role}`, "data-expert": id, "data-value": value, title: `expert ${id}: ${figure(value, 4)}` },
      element("div", { class: "trw-room" }, element("span", { class: "trw-stick", style }), label),
      element("span", { class: "trw-expert" }, tag),
      few ? element("span", { class: "trw-role", title: word }, room >= ROLE_PX ? word : short) : null,
    );
  });
  const last = record.topk_ids.at(-1);
  // The margin's label stands where it covers the fewest numbers, those of the choices last.
  const cost = (id) => (id === full.runner_up || record.topk_ids.includes(id) ? 9 : 0)
    + (height((values[id] ?? 0) - values[last]) > -MARGIN_PART ? 1 : 0);
  const wide = Math.min(values.length, Math.ceil(MARGIN_PX / room));
  const covered = (first) => values.slice(first, first + wide).reduce((sum, _, at) => sum + cost(first + at), 0);
  const firsts = values.slice(wide - 1).map((_, first) => first);
  const best = firsts.reduce((found, first) => (covered(first) <= covered(found) ? first : found), 0);
  const middle = (100 * (best + wide / 2)) / values.length;
  const gap = margin && full.runner_up >= 0 && record.margin !== null
    && values[last] !== null && values[full.runner_up] !== null
    ? [element("div", {
      class: "trw-margin",
      style: `bottom: ${height(values[full.runner_up] - low)}%; height: ${height(values[last] - values[full.runner_up])}%`,
    }, element("span", { style: `left: ${middle}%` }, `margin ${figure(record.margin)}`))] : [];
  return element(
    "div", { class: `trw-bars ${few ? "trw-few" : ""} ${low < 0 ? "trw-signed" : ""}` },
    element("div", { class: "trw-plot" },
      element("div", { class: "trw-zone" }, element("div", { class: "trw-zero", style: `bottom: ${height(-low)}%` }), ...gap),
      ...columns),
    element("div", { class: "trw-under" }, margin ? `score of each expert${SCORED[full.scored] ?? ""}` : "logit of each expert"),
  );
}

// How scores come of logits, and weights of scores, where the recorded numbers fit.
const SCORED = {
  softmax: ": softmax of the logits, exp(logit) ÷ the sum of exp over all experts",
  sigmoid: ": 1 ÷ (1 + exp(−logit))",
};
const WEIGHED = {
  shares: ": its score ÷ the sum of the chosen scores",
  scores: ": its score",
};

// Those of the experts, most important first, whose labels do not run into one another.
function spaced(experts, room) {
  const taken = [];
  for (const id of experts) {
    if (id >= 0 && taken.every((other) => Math.abs(other - id) * room >= LABEL_PX)) taken.push(id);
  }
  return taken;
}

function placed({ record, full, who }, id, at) {
  const device = record.devices?.[at];
  return element(
    "div", { class: "trw-place" },
    element("span", { class: `trw-box ${at ? "" : "trw-first"}` }, `expert ${id}`), element("i", {}, "→"),
    element("span", { class: "trw-box" }, `physical ${record.physical[at]}`), element("i", {}, "→"),
    element("span", { class: "trw-box" }, device === undefined ? "device not recorded" : `device ${device}`),
    element("span", { class: "trw-why" }, full?.reasons[at] ?? (device === who.home ? "the token’s own device" : "")),
  );
}

function deviceBoxes(stop) {
  const { record, who, engine } = stop;
  const used = new Set([who.home, ...record.devices]);
  const all = Array.from({ length: engine.num_devices }, (_, device) => device);
  const shown = engine.num_devices <= 8 ? all : all.filter((device) => used.has(device));
  const boxes = shown.map((device) => {
    const here = choices(stop).filter(({ at }) => record.devices[at] === device);
    const trip = device === who.home ? "the token’s home" : here.length ? `⇠ a copy from device ${who.home}` : "not needed";
    return element(
      "div", { class: `trw-device ${here.length ? "" : "trw-unused"}` },
      element("div", { class: "trw-device-name" }, strong(`device ${device}`), element("span", {}, trip)),
      ...here.map(({ id, at }) => element("span", { class: `trw-box ${at ? "" : "trw-first"}` }, `expert ${id}`)),
    );
  });
  const rest = all.length - shown.length;
  return element("div", { class: "trw-devices" }, ...boxes, rest ? element("div", { class: "trw-device trw-unused" }, `${rest} more, not needed`) : null);
}

function weightBars(stop) {
  const rows = choices(stop).map(({ id, at }) => {
    const weight = stop.record.topk_weights[at];
    return element(
      "div", { class: "trw-weight", "data-expert": id, "data-value": weight },
      element("span", {}, `expert ${id}`),
      element("span", { class: "trw-rail" }, element("span", { class: at ? "" : "trw-first", style: `width: ${100 * limited(weight ?? 0, 0, 1)}%` })),
      element("span", { class: "trw-amount" }, figure(weight)),
    );
  });
  return element("div", { class: "trw-weights" }, element("div", { class: "trw-under" }, `weight of each chosen expert${WEIGHED[stop.full?.weighed] ?? ""}`), ...rows);
}

function equation(stop) {
  const terms = choices(stop).flatMap(({ id, at }) => [
    at ? " + " : "", strong(figure(stop.record.topk_weights[at])), ` × expert ${id}`,
  ]);
  return element("p", { class: "trw-equation" }, "output = ", ...terms);
}

function neighbours({ who, here, before, engine }) {
  const box = (...words) => element("p", { class: "trw-neighbour" }, ...words);
  if (!who.position) return box("This is the first token: there is none before it to compare with.");
  if (!before) return box("The token before it was not recorded: nothing to compare with.");
  const [now, then] = [who.layers[here].topk_ids, before.layers[here].topk_ids];
  const kept = now.filter((id) => then.includes(id));
  const [came, went] = [now.filter((id) => !then.includes(id)), then.filter((id) => !now.includes(id))];
  const from = ["From the token before, ", strong(before.text), `, in layer ${engine.layers[here]}: `];
  if (!came.length) return box(...from, `same experts kept (${listed(kept.map(String))}).`);
  const jump = `${listed(went.map(String))} → ${listed(came.map(String))}`;
  if (!kept.length) return box(...from, `jumped, ${jump}, nothing kept.`);
  return box(...from, `${listed(kept.map(String))} kept, ${jump} changed.`);
}

// ---- the same as a table

function numbersTable({ record, full, engine }) {
  const experts = full ? Array.from({ length: engine.num_experts }, (_, id) => id) : record.topk_ids.filter((id) => id >= 0);
  const heads = ["expert", "logit", "score", "choice", "weight", "physical", "device", "why there"];
  const rows = experts.map((id) => {
    const at = record.topk_ids.indexOf(id);
    const cells = [
      full ? figure(full.logits[id], 4) : "–", full ? figure(full.scores[id], 4) : "–",
      at >= 0 ? String(at + 1) : full && id === full.runner_up ? "runner-up" : "",
      at >= 0 ? figure(record.topk_weights[at], 4) : "", at >= 0 ? String(record.physical[at]) : "",
      at >= 0 ? String(record.devices?.[at] ?? "–") : "", at >= 0 ? full?.reasons[at] ?? "–" : "",
    ];
    return element("tr", { class: at >= 0 ? "trw-chosen-row" : null }, element("th", { scope: "row" }, String(id)), ...cells.map((cell) => element("td", {}, cell)));
  });
  return element("table", {}, element("thead", {}, element("tr", {}, ...heads.map((head) => element("th", { scope: "col" }, head)))), element("tbody", {}, ...rows));
}

export default { render };
