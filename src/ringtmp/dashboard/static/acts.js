// What a viewer with the secret to act may do. Everything asks first.

import { $ } from "./text.js";

export class Acts {
  draw() { $("acts").hidden = true; }
}
