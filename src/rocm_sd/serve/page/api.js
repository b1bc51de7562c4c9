// Calls of the server: JSON, the API key where it has keys, and the events of a job as they come.

import { askForKey, knownKey } from "./key.js";

/** An answer that is an error, in the server's words. `status` is 0 where there was no answer. */
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** `quiet`: a call that nobody asked for, which asks nobody for a key. `outlives`: it is sent even if the page ends. */
export async function call(path, { method = "GET", body, quiet = false, outlives = false } = {}) {
  return (await send(path, { method, body, quiet, outlives })).json();
}

/** [kind, what is said] of each server-sent event. EventSource sends no key, so they are read from a stream. */
export async function* events(path) {
  const response = await send(path, {});
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    let text = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      text += value;
      let end;
      while ((end = text.indexOf("\n\n")) >= 0) {
        const event = parsed(text.slice(0, end));
        text = text.slice(end + 2);
        if (event) yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function parsed(block) {
  const fields = new Map(block.split("\n").map((line) => [line.split(":", 1)[0], line.slice(line.indexOf(":") + 1).trim()]));
  // A comment keeps the connection open and says nothing.
  return fields.has("data") ? [fields.get("event") ?? "message", JSON.parse(fields.get("data"))] : null;
}

async function send(path, { method, body, quiet, outlives }) {
  for (;;) {
    const key = knownKey();
    const headers = {};
    if (key) headers.authorization = `Bearer ${key}`;
    if (body) headers["content-type"] = "application/json";
    let response;
    try {
      response = await fetch(path, { method, headers, body: body && JSON.stringify(body), keepalive: outlives });
    } catch {
      throw new Refused(0, "The server does not answer. Is it running?");
    }
    if (response.ok) return response;
    // Another call may have been given a key meanwhile.
    if (response.status === 401 && !quiet && (knownKey() !== key || (await askForKey(key)))) continue;
    throw new Refused(response.status, await words(response));
  }
}

async function words(response) {
  try {
    const { detail } = await response.json();
    if (typeof detail === "string" && detail) return detail;
  } catch {
    // No JSON: something between the page and the server answered.
  }
  const later = response.headers.get("retry-after");
  if (response.status === 429) return `The server is busy. Try again ${later ? `in ${later} s` : "later"}.`;
  return `The server answered with an error (${response.status}).`;
}
