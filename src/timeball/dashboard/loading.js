// The state of a page before the broker has answered: loading, out of reach, or refused. Until then the page shows no
// empty list, which would say that the broker has no data.

import { el, show, write } from './dom.js';

const LOADING = 'Loading …';

export class Loading {
  /** `parts` are elements that are hidden until the broker has answered. */
  constructor(...parts) {
    this.parts = parts;
    this.node = el('p', { class: 'loading', role: 'status' });
    this.begin();
  }

  /** Hide the parts and wait for an answer. Also for another request of the same page. */
  begin() {
    this.isWaiting = true;
    write(this.node, LOADING);
    show(this.node, true);
    for (const part of this.parts) show(part, false);
  }

  /** The broker has answered: show the parts. */
  done() {
    if (!this.isWaiting) return;
    this.isWaiting = false;
    show(this.node, false);
    for (const part of this.parts) show(part, true);
  }

  /** Show that no answer comes, with the reason. Parts that show an earlier answer stay. */
  lost(reason) {
    if (this.isWaiting) write(this.node, `No answer yet: ${reason}. The page asks again by itself.`);
  }

  /** The broker has refused: hide this text. The page shows the reason itself. */
  refused() {
    show(this.node, false);
  }
}
