// The form for an account, which is shown after an answer 401.

import { Problem, get, signIn, signOut } from './api.js';
import { el, show, write } from './dom.js';
import { field } from './dialogs.js';

/** Show the form in `root`, with a reason if an account was refused. Calls `done()` after a successful sign-in. */
export function signInForm(root, reason, done) {
  const accessKey = el('input', { id: 'access-key', autocomplete: 'username', required: true, spellcheck: 'false' });
  const secretKey = el('input', { id: 'secret-key', type: 'password', autocomplete: 'current-password', required: true });
  const fault = el('p', { class: 'verdict bad', role: 'alert', hidden: reason === '' }, reason);
  const go = el('button', { type: 'submit', class: 'primary' }, 'Sign in');

  async function submit(event) {
    event.preventDefault();
    go.disabled = true;
    try {
      signIn(accessKey.value.trim(), secretKey.value);
      await get(['v1', 'broker']);
      done();
    } catch (error) {
      // An account without the right to read /v1/broker is signed in too: the pages show what it may not read.
      if (error instanceof Problem && error.status === 403) return done();
      signOut();
      write(fault, error.message);
      show(fault, true);
      go.disabled = false;
      secretKey.select();
    }
  }

  root.append(el('form', { class: 'card narrow', onsubmit: submit },
    el('p', {}, 'This broker asks who calls. Accounts are in its access file; one without admin = true may look and change nothing.'),
    fault, field('Access key', accessKey), field('Secret key', secretKey, 'Kept in this tab until you close it or sign out.'),
    el('div', { class: 'actions' }, go)));
  accessKey.focus();
  return { close() {} };
}
