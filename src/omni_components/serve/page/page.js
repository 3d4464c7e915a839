"use strict";
// Shows what the service tells; nothing is kept between visits.

const by = (id) => document.getElementById(id);
const MOST_LINES = 400;
const STAYS = { load: "device", evict: "host" };
const known = new Map();
let key = "";
let busy = false;

function headers(more = {}) {
  return key ? { ...more, Authorization: `Bearer ${key}` } : more;
}

function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (count >= 1024 && at < units.length - 1) { count /= 1024; at += 1; }
  return `${at ? count.toFixed(1) : count} ${units[at]}`;
}

// --- who is where ---------------------------------------------------------------------------------------

function card(component) {
  const item = document.createElement("li");
  item.className = "component";
  item.dataset.component = component.name;
  item.dataset.resident = component.resident;
  const name = document.createElement("span");
  const size = document.createElement("small");
  name.textContent = component.name;
  size.textContent = bytes(component.bytes);
  item.append(name, size);
  return item;
}

function place(name, where) {
  const item = known.get(name);
  if (!item || item.dataset.place === where) return;
  item.dataset.place = where;
  by(where === "device" ? "on-device" : "host").append(item);
}

function level(now, peak) {
  const meter = by("bytes").parentElement;
  if (peak > Number(meter.dataset.peak || 0)) meter.dataset.peak = peak;
  const most = Number(meter.dataset.peak || 0) * 1.1 || 1;
  by("bytes").style.width = `${(100 * now) / most}%`;
  by("peak").style.left = `${(100 * Number(meter.dataset.peak || 0)) / most}%`;
  by("numbers").textContent = `${bytes(now)} on the device, ${bytes(Number(meter.dataset.peak || 0))} at the peak`;
}

function showState(state) {
  document.title = by("model").textContent = state.model;
  by("device").textContent = state.device;
  by("status").textContent = "connected";
  known.clear();
  by("host").replaceChildren();
  by("on-device").replaceChildren();
  for (const component of state.components) {
    known.set(component.name, card(component));
    place(component.name, component.state === "host" ? "host" : "device");
  }
  level(state.device_bytes, state.peak_bytes);
}

function showMove(event) {
  if (STAYS[event.kind]) place(event.component, STAYS[event.kind]);
  level(event.device_bytes, event.device_bytes);
  logLine(event, event.kind, event.component);
}

function logLine(event, kind, of) {
  const line = document.createElement("li");
  line.dataset.kind = kind;
  line.dataset.of = of;
  for (const text of [`${event.at.toFixed(3)} s`, kind, of, event.bytes ? bytes(event.bytes) : ""]) {
    const cell = document.createElement("span");
    cell.textContent = text;
    line.append(cell);
  }
  by("log").prepend(line);
  if (by("log").children.length > MOST_LINES) by("log").lastElementChild.remove();
}

const SHOWN = {
  state: showState,
  moved: showMove,
  skipped: (event) => logLine(event, "skipped", `${event.messages} events`),
  started: () => { by("progress").value = 0; },
  step: (event) => { by("progress").value = event.done / event.total; },
  finished: () => { by("progress").value = 1; },
};

// --- the stream -----------------------------------------------------------------------------------------
// fetch, not EventSource: that one cannot send a key.

function take(message) {
  const kind = /^event: (.*)$/m.exec(message);
  const data = /^data: (.*)$/m.exec(message);
  if (kind && data && SHOWN[kind[1]]) SHOWN[kind[1]](JSON.parse(data[1]));
}

async function follow() {
  const answer = await fetch("v1/events", { headers: headers() });
  by("key-field").hidden = by("key-field").hidden && answer.status !== 401;
  if (!answer.ok) throw new Error(answer.status === 401 ? "an API key is needed" : `status ${answer.status}`);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the service has ended the stream");
    const messages = (rest + value).split("\n\n");
    rest = messages.pop();
    messages.forEach(take);
  }
}

async function keepFollowing() {
  for (;;) {
    try {
      await follow();
    } catch (error) {
      by("status").textContent = `not connected: ${error.message}`;
    }
    await new Promise((resolve) => setTimeout(resolve, 1000));
  }
}

// --- asking ---------------------------------------------------------------------------------------------

async function draw() {
  const asked = { prompt: by("prompt").value, response_format: "b64_json" };
  if (by("seed").value) asked.seed = Number(by("seed").value);
  if (by("steps").value) asked.num_inference_steps = Number(by("steps").value);
  const start = performance.now();
  const answer = await fetch("v1/images/generations", {
    method: "POST",
    headers: headers({ "Content-Type": "application/json" }),
    body: JSON.stringify(asked),
  });
  const told = await answer.json();
  if (!answer.ok) throw new Error(told.error.message);
  const [picture] = told.data;
  by("picture").src = `data:image/${told.output_format};base64,${picture.b64_json}`;
  by("picture").alt = asked.prompt;
  by("picture").hidden = false;
  const seconds = ((performance.now() - start) / 1000).toFixed(2);
  by("caption").textContent = `${asked.prompt} · seed ${picture.seed} · ${seconds} s`;
}

by("ask").addEventListener("submit", async (event) => {
  event.preventDefault();
  if (busy) return;
  busy = by("go").disabled = true;
  by("problem").textContent = "";
  try {
    await draw();
  } catch (error) {
    by("problem").textContent = error.message;
  } finally {
    busy = by("go").disabled = false;
  }
});
by("key").addEventListener("change", () => { key = by("key").value; });
by("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); by("ask").requestSubmit(); }
});
keepFollowing();
