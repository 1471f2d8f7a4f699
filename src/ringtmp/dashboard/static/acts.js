// What a viewer with the address to act may do. Everything asks first, and says what came of it.

import { $, make, say } from "./text.js";

export const wish = (path, run, request) => fetch(path, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify({ run, request }) });

const QUESTIONS = {
  stop: ["Stop the run", "Stop the run? It finishes its step, saves a checkpoint and ends; it can be resumed.", "Stop it"],
  checkpoint: ["Checkpoint now", "Save a checkpoint now? Training pauses while it is written.", "Save it"],
};

export class Acts {
  constructor(number, run) {
    this.number = number;
    this.run = run;
    $("ask-no").addEventListener("click", () => $("ask").close());
    $("ask-yes").addEventListener("click", () => { $("ask").close(); this.send(); });
  }

  draw(may) {
    const run = this.run(), goes = ["running", "healing"].includes(run.status);
    $("acts").hidden = !may || !goes;
    if (!may) return;
    const devices = (run.memberships.at(-1)?.members ?? []).filter((each) => each.node && each.name !== `node ${each.node}`);
    const wanted = [...Object.entries(QUESTIONS).map(([key, texts]) => [key, ...texts]),
      ...devices.map((each) => [`release-${each.node}`, `Release ${each.name}`, `Release ${each.name}? The ring goes on without it from the next step; the device stays admitted.`, "Release it"])];
    const key = wanted.map((each) => each[0]).join(), box = $("act-buttons");
    if (box.dataset.key === key) return;
    box.dataset.key = key;
    box.replaceChildren(...wanted.map(([request, label, question, yes]) => {
      const button = make("button", { type: "button", id: `act-${request}` }, label);
      button.addEventListener("click", () => { this.request = request; this.label = label; say($("ask-text"), question); say($("ask-yes"), yes); $("ask").showModal(); });
      return button;
    }));
  }

  send() {
    say($("act-said"), `${this.label}: asking…`);
    wish("/act", this.number(), this.request).then(async (answer) => say($("act-said"), answer.ok ? `${this.label}: asked. It is done at the end of a step.` : `${this.label}: ${await answer.text()}`)).catch(() => say($("act-said"), "The server did not answer."));
  }
}
