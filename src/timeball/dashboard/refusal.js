// The text of a page whose data the broker refuses.

import { el, show, write } from './dom.js';

/** Return a line with `show(problem)`, which shows a Problem, or hides the line for null. */
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
