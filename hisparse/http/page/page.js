// A conversation over POST /v1/chat/completions, and its request's life from GET /v1/requests/ID.
// Whatever comes from the server is written as text, never as markup.
"use strict";

const HEALTH_MS = 2000; // between two looks at /health
const LOOK_MS = 400; // between two looks at the request

const at = (id) => document.getElementById(id);
const turns = []; // as the API has them
let leaving = null; // cancels the answer that comes

const headers = (more) => {
  const key = at("key").value.trim();
  return { ...(key ? { authorization: `Bearer ${key}` } : {}), ...more };
};

function show(id, value) {
  const text = value === null || value === undefined || value === "" ? "-" : String(value);
  if (at(id).textContent !== text) at(id).textContent = text;
}

function addTurn(role) {
  const item = document.createElement("li");
  item.className = role;
  item.dataset.role = role;
  const reasoning = document.createElement("span");
  reasoning.className = "reasoning";
  const text = document.createElement("span");
  item.append(reasoning, text);
  at("turns").append(item);
  item.scrollIntoView();
  return { item, reasoning, text };
}

// ---------------------------------------------------------------- the answer

async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    text += value;
    for (let end; (end = text.indexOf("\n\n")) >= 0; text = text.slice(end + 2)) {
      const line = text.slice(0, end);
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}

const sentence = (body, status) => (body && body.error && body.error.message) || `The server answered ${status}.`;

async function answer(id, shown, signal) {
  const response = await fetch("/v1/chat/completions", {
    method: "POST",
    headers: headers({ "content-type": "application/json", "idempotency-key": id }),
    body: JSON.stringify({
      messages: turns,
      stream: true,
      stream_options: { include_usage: true },
      max_completion_tokens: Number(at("tokens").value),
      temperature: Number(at("temperature").value),
    }),
    signal,
  });
  if (!response.ok) throw new Error(sentence(await response.json().catch(() => null), response.status));
  let said = "";
  for await (const event of eventsOf(response)) {
    if (event.error) throw new Error(sentence(event, response.status));
    if (event.usage) showUsage(event.usage);
    for (const { delta } of event.choices) {
      if (delta.reasoning_content) shown.reasoning.append(delta.reasoning_content);
      if (delta.content) {
        said += delta.content;
        shown.text.append(delta.content);
      }
    }
    at("turns").scrollTop = at("turns").scrollHeight;
  }
  return said;
}

function showUsage(usage) {
  show("prompt", `${usage.prompt_tokens} tokens`);
  show("cached", `${usage.prompt_tokens_details.cached_tokens} tokens`);
  show("generated", usage.completion_tokens);
}

// ---------------------------------------------------------------- its life

function startLife(id) {
  const began = performance.now();
  const points = []; // [ms, generated tokens]: of the last seconds
  let last = "";
  let stopped = false;
  at("life").replaceChildren();
  for (const name of ["state", "reason", "worker", "prompt", "cached", "generated", "speed", "hits", "retractions"]) show(name, "");
  show("id", id);

  function step(text) {
    const item = document.createElement("li");
    item.textContent = `${((performance.now() - began) / 1000).toFixed(1)} s: ${text}`;
    at("life").append(item);
  }

  function showRow(row) {
    const place = row.worker ? ` on ${row.worker}` : "";
    const now = `${row.state.toLowerCase()}${place}${row.waits_for ? `, waits for ${row.waits_for}` : ""}`;
    if (now !== last) step((last = now));
    show("state", row.state);
    show("reason", row.reason);
    show("worker", row.worker);
    show("prompt", `${row.prompt_tokens} tokens`);
    show("generated", `${row.generated_tokens} of ${row.max_tokens}`);
    show("hits", row.hit_rate === null ? "" : `${(100 * row.hit_rate).toFixed(1)} %`);
    show("retractions", row.retractions);
    points.push([performance.now(), row.generated_tokens]);
    while (points.length > 2 && points[points.length - 1][0] - points[0][0] > 3000) points.shift();
    const [[first, before], [latest, after]] = [points[0], points[points.length - 1]];
    if (after > before) show("speed", ((1000 * (after - before)) / (latest - first)).toFixed(1));
  }

  async function look() {
    try {
      const response = await fetch(`/v1/requests/${encodeURIComponent(id)}`, { headers: headers() });
      if (response.ok) showRow(await response.json());
    } catch {
      // the next look may find it
    }
  }

  (async () => {
    while (!stopped) {
      await new Promise((done) => setTimeout(done, LOOK_MS)); // first of all: it is not known at once
      if (!stopped) await look();
    }
  })();
  return async (end) => {
    stopped = true;
    await look();
    step(end);
  };
}

// ---------------------------------------------------------------- the page

function randomId() {
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return "page-" + Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

async function send() {
  const text = at("text").value;
  at("text").value = "";
  addTurn("user").text.append(text);
  turns.push({ role: "user", content: text });
  const shown = addTurn("assistant");
  const id = randomId();
  leaving = new AbortController();
  at("send").disabled = at("clear").disabled = true;
  at("stop").disabled = false;
  const endLife = startLife(id);
  let end = "answered";
  let said = "";
  try {
    said = await answer(id, shown, leaving.signal);
  } catch (error) {
    end = leaving.signal.aborted ? "stopped here" : "failed";
    said = shown.text.textContent;
    const note = document.createElement("span");
    note.className = "error";
    note.textContent = leaving.signal.aborted ? " (stopped)" : ` ${error.message}`;
    shown.item.append(note);
  }
  turns.push({ role: "assistant", content: said });
  at("stop").disabled = true;
  await endLife(end);
  at("send").disabled = at("clear").disabled = false;
}

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!at("send").disabled) send();
});
at("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    at("ask").requestSubmit();
  }
});
at("stop").addEventListener("click", () => leaving && leaving.abort());
at("clear").addEventListener("click", () => {
  turns.length = 0;
  at("turns").replaceChildren();
});

async function lookAtHealth() {
  let text = "no answer";
  let good = false;
  try {
    const response = await fetch("/health");
    good = response.ok;
    text = (await response.json()).status;
    if (!at("model").textContent) {
      const models = await fetch("/v1/models", { headers: headers() });
      if (models.ok) show("model", (await models.json()).data[0].id);
    }
  } catch {
    // said below
  }
  show("health", text);
  at("health").className = good ? "" : "bad";
}

lookAtHealth();
setInterval(lookAtHealth, HEALTH_MS);
