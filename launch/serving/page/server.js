// Requests to the server, streamed answers, and the server's health.
import {keep, kept} from "./dom.js";

// The server is unavailable: the request can be retried once it is back.
export class Lost extends Error {}

let key = kept("sessionStorage", "helix.key") ?? "";

export function useKey(value) {
  key = value;
  keep("sessionStorage", "helix.key", value);
}

export const hasKey = () => Boolean(key);

const headers = () => ({"Content-Type": "application/json", ...(key && {Authorization: `Bearer ${key}`})});

export const models = () => fetch("v1/models", {headers: headers()});

export async function post(path, body, signal) {
  const answer = await fetch(path, {method: "POST", headers: headers(), body: JSON.stringify(body), signal}).catch((error) => {
    throw signal.aborted ? error : new Lost("The connection to the server broke off.");
  });
  if (answer.ok) return answer;
  const told = await answer.json().catch(() => null);  // a proxy's error for an unavailable server is not JSON
  if (answer.status === 503 && told) throw new Lost(`The server is ${told.error.message}`);
  if (answer.status >= 500 && !told) throw new Lost("The server does not answer.");
  throw Object.assign(new Error(told?.error.message ?? `The server answered with status ${answer.status}.`), {status: answer.status});
}

// Yields the events of a streamed answer up to [DONE].
export async function* events(answer, signal) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let held = "";;) {
    const {done, value} = await reader.read().catch((error) => {
      throw signal.aborted ? error : new Lost("The connection to the server broke off.");
    });
    if (done) throw new Lost("The answer broke off.");
    const pieces = (held + value).split("\n\n");
    held = pieces.pop();
    for (const piece of pieces)
      for (const line of piece.split("\n")) {
        if (line === "data: [DONE]") return;
        if (!line.startsWith("data: ")) continue;
        const event = JSON.parse(line.slice(6));
        if (!event.error) yield event;
        else if ((await health()).ends) throw new Lost(event.error.message);
        else throw new Error(event.error.message);  // caused by this request: retrying it automatically might crash the server again
      }
  }
}

// Returns why the server cannot answer ("" if it can), and whether its process is shutting down.
export async function health() {
  const answer = await fetch("health").catch(() => null);
  const told = await answer?.json().catch(() => null);
  if (!told) return {trouble: "The server does not answer", ends: true};
  return {trouble: answer.ok ? "" : `The server is ${told.state}: ${told.reason}`, ends: told.state === "draining"};
}
