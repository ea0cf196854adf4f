// What a page says in place of figures that the broker does not give.

import { el, show, write } from './dom.js';

/** Return a line that shows a Problem; null hides it. */
export function refusal() {
  const node = el('p', { class: 'verdict warn', role: 'status', hidden: true });
  return {
    node,
    show(problem) {
      show(node, problem !== null);
      if (problem?.status === 403) write(node, `This account may not look at this: ${problem.message}.`);
      else if (problem) write(node, `${problem.message} (${problem.code})`);
    },
  };
}
