// The state of a page before the broker has answered: loading, out of reach, or refused. An empty page would be a lie.

import { el, show, write } from './dom.js';

const LOADING = 'Loading …';

export class Loading {
  /** `parts`: elements that mean something only once the broker has answered; they are hidden until then. */
  constructor(...parts) {
    this.parts = parts;
    this.node = el('p', { class: 'loading', role: 'status' });
    this.begin();
  }

  /** Wait for an answer: also again, for another question. */
  begin() {
    this.isWaiting = true;
    write(this.node, LOADING);
    show(this.node, true);
    for (const part of this.parts) show(part, false);
  }

  /** Show the parts: the broker has answered. */
  done() {
    if (!this.isWaiting) return;
    this.isWaiting = false;
    show(this.node, false);
    for (const part of this.parts) show(part, true);
  }

  /** Say that no answer comes. Parts that show an earlier answer stay. */
  lost(reason) {
    if (this.isWaiting) write(this.node, `No answer yet: ${reason}. The page asks again by itself.`);
  }

  /** Leave it to the page to say why the broker refuses. */
  refused() {
    show(this.node, false);
  }
}
