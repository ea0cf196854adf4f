// Dialogs. An action is always confirmed in one, which names the object, runs the action and shows its verdict.

import { Problem } from './api.js';
import { button, el, show, write } from './dom.js';
import { printable } from './format.js';

let opened = null;

/** Close the dialog that is open, if there is one. */
export const closeDialog = () => opened?.close();

/** Open a dialog in the place of an open one. Returns its element. */
function dialog(title, ...children) {
  closeDialog();
  const heading = el('h2', { id: 'dialog-title' }, title);
  const node = el('dialog', { 'aria-labelledby': 'dialog-title' }, heading, ...children);
  node.addEventListener('close', () => {
    opened = null;
    node.remove();
  });
  // A click beside the dialog closes it, except if it shows a secret that is shown only once (`isKept`).
  node.addEventListener('click', event => event.target === node && !node.isKept && node.close());
  document.body.append(node);
  node.showModal();
  opened = node;
  return node;
}

/** Return a list of pairs of a name and a text or node. Pairs without a value are left out. */
export function facts(pairs) {
  return el('dl', { class: 'facts' }, ...pairs.filter(([, value]) => value !== undefined && value !== null && value !== '')
    .map(([name, value]) => el('div', {}, el('dt', {}, name), el('dd', {}, value instanceof Node ? value : String(value)))));
}

/** Open a dialog that only shows nodes. */
export function showDialog(title, ...children) {
  const close = button('Close', closeDialog, 'primary');
  dialog(title, ...children, el('div', { class: 'actions' }, close));
  close.focus();
}

/**
 * Ask for a confirmation, run `act()`, show its verdict, and call `done()`.
 *
 * `act()` returns [text, tone, node]. The tone `good` or `warn` ends the action. After `again`, `bad` and an error, the
 * user may try again. The node is optional, and a dialog with a node closes only by its button.
 */
export function confirm({ title, about = [], note = '', fields = [], label, isDangerous = false, act, done }) {
  const verdict = el('p', { class: 'verdict', role: 'status', hidden: true });
  const keep = button('Leave it', closeDialog);
  const go = el('button', { type: 'submit', class: isDangerous ? 'danger' : 'primary' }, label);
  const form = el('form', { novalidate: true, onsubmit: submit }, facts(about), note ? el('p', {}, note) : null, ...fields,
    verdict, el('div', { class: 'actions' }, keep, go));
  const node = dialog(title, form);
  (form.querySelector('input, select, textarea') ?? keep).focus();

  async function submit(event) {
    event.preventDefault();
    if (go.disabled) return;
    go.disabled = true;
    let tone;
    let text;
    let shown;
    try {
      [text, tone, shown] = await act();
    } catch (error) {
      [text, tone] = [error instanceof Problem ? `${error.message} (${error.code})` : error.message, 'bad'];
    }
    write(verdict, text);
    verdict.className = `verdict ${tone}`;
    show(verdict, true);
    if (tone === 'bad' || tone === 'again') {
      // The user may correct a field and try again.
      go.disabled = false;
    } else {
      for (const field of form.querySelectorAll('input, select, textarea')) field.disabled = true;
      show(go, false);
      node.isKept = shown !== undefined;
      if (shown) verdict.after(shown);
      write(keep, 'Close');
      keep.focus();
    }
    done?.();
  }
}

/** Return an input with its label and its hint. Gives the input an id if it has none. */
export function field(label, input, hint) {
  input.id ||= `field-${label.toLowerCase().replace(/\W+/g, '-')}`;
  if (hint) input.setAttribute('aria-describedby', `${input.id}-hint`);
  return el('div', { class: 'field' }, el('label', { for: input.id }, label), input,
    hint ? el('p', { class: 'hint', id: `${input.id}-hint` }, hint) : null);
}

/** Add names to a select as options, unless it has them. */
export function addOptions(node, names) {
  const known = new Set([...node.options].map(option => option.value));
  node.append(...names.filter(name => !known.has(name)).map(name => el('option', { value: name }, printable(name, 80))));
}

/** Return a select of [value, label] pairs. */
export function select(options, value, attributes = {}) {
  const node = el('select', attributes, ...options.map(([each, label]) => el('option', { value: each }, label)));
  if (value !== undefined) node.value = value;
  return node;
}
