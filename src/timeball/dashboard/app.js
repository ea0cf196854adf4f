// The frame around the pages: which one is open, who is signed in, whether the broker answers, the colours.

import { account, accountName, signOut } from './api.js';
import { broker, leaveBroker, watchBroker } from './broker.js';
import { closeDialog } from './dialogs.js';
import { el, set, show, write } from './dom.js';
import { clock, span } from './format.js';
import { pages } from './pages/all.js';
import { askNow, reach } from './poll.js';
import { signInForm } from './sign_in.js';

const at = id => document.getElementById(id);
let open = null; // { page, view }

// ---- pages ------------------------------------------------------------------------------------------------------

/** Return the page that the address names, and its parameters: #/waiting?key=order-17. */
function address() {
  const [path, query = ''] = location.hash.replace(/^#\/?/, '').split('?');
  return { page: pages.find(page => page.id === path) ?? pages[0], parameters: new URLSearchParams(query) };
}

function follow() {
  const { page, parameters } = address();
  if (open?.page === page && open.view.follow) {
    open.view.follow(parameters);
    return;
  }
  const isFirst = open === null;
  enter(page, () => page.open(at('page'), parameters));
  // Where a reader of the page aloud, or its keyboard, goes on.
  if (!isFirst) at('title').focus();
}

function enter(page, makeView) {
  closeDialog();
  open?.view.close();
  at('page').replaceChildren();
  write(at('title'), page.title);
  document.title = `${page.title} – Timeball`;
  for (const link of at('pages').querySelectorAll('a')) {
    set(link, 'aria-current', link.dataset.page === page.id && 'page');
  }
  set(document.body, 'data-page', page.id);
  closeMenu();
  open = { page, view: makeView() };
  scrollTo(0, 0);
}

function begin() {
  at('pages').append(...pages.map(page => el('li', { hidden: Boolean(page.isShown) },
    el('a', { href: `#/${page.id}`, 'data-page': page.id }, page.title))));
  addEventListener('hashchange', follow);
  at('skip').addEventListener('click', event => {
    event.preventDefault();
    at('main').focus();
  });
  at('menu').addEventListener('click', () => {
    const isOpen = document.body.classList.toggle('menu-open');
    set(at('menu'), 'aria-expanded', isOpen ? 'true' : 'false');
  });
  showAccount();
  watchBroker();
  follow();
}

function closeMenu() {
  document.body.classList.remove('menu-open');
  set(at('menu'), 'aria-expanded', 'false');
}

// ---- the account ------------------------------------------------------------------------------------------------

function showAccount() {
  show(at('account'), account() !== '');
  write(at('account-name'), accountName());
}

document.addEventListener('timeball-unauthorized', event => {
  if (open?.page.id === 'sign-in') return;
  const wasRefused = account() !== '';
  signOut();
  askForAccount(wasRefused ? event.detail.message : '');
});

function askForAccount(reason) {
  leaveBroker();
  showAccount();
  enter({ id: 'sign-in', title: 'Sign in' }, () => signInForm(at('page'), reason, () => {
    showAccount();
    open = { page: { id: '' }, view: { close() {} } };
    watchBroker();
    follow();
  }));
}

at('sign-out').addEventListener('click', () => {
  signOut();
  askForAccount('');
});

// ---- whether the broker answers ---------------------------------------------------------------------------------

function showReach() {
  const isLost = reach.lostMs > 0;
  show(at('reach'), isLost);
  set(at('live'), 'data-state', isLost ? 'lost' : reach.reachedMs ? 'live' : 'connecting');
  if (isLost) {
    // Written once and not each second: it is read aloud.
    write(at('reach-text'), `Broker out of reach since ${clock(reach.lostMs)} (${reach.reason}). `
      + 'The figures below are those from before.');
    const leftMs = Math.max(0, reach.againMs - Date.now());
    write(at('live-text'), leftMs >= 1_000 ? `next try in ${span(leftMs)}` : 'trying again');
  } else if (reach.reachedMs) {
    const isManual = broker.status?.clock === 'manual';
    write(at('live-text'), `${isManual ? 'manual clock' : 'live'}, ${clock(reach.reachedMs + broker.aheadMs)}`);
  }
}

reach.addEventListener('change', showReach);
setInterval(() => !document.hidden && reach.lostMs && showReach(), 1_000);
at('reach-now').addEventListener('click', askNow);

// Pages show buttons only to accounts that may use them.
broker.addEventListener('change', () => document.body.classList.toggle('may-admin', broker.mayAdmin));

// A page that has nothing to say of this broker is not offered.
broker.addEventListener('change', () => {
  for (const page of pages.filter(({ isShown }) => isShown)) {
    show(at('pages').querySelector(`[data-page="${page.id}"]`).parentNode, page.isShown(broker.status));
  }
});

// ---- colours ----------------------------------------------------------------------------------------------------

const colours = at('colours');
colours.querySelector(`[value="${document.documentElement.dataset.colours ?? 'auto'}"]`).checked = true;
colours.addEventListener('change', event => {
  const chosen = event.target.value;
  if (chosen === 'auto') delete document.documentElement.dataset.colours;
  else document.documentElement.dataset.colours = chosen;
  try {
    localStorage.setItem('timeball-colours', chosen);
  } catch {
    // Storage is blocked: the choice holds for this page.
  }
});

begin();
