// The frame around the pages: the open page, the account, whether the broker answers, and the colours.

import { account, accountName, signOut } from './api.js';
import { broker, leaveBroker, watchBroker } from './broker.js';
import { closeDialog } from './dialogs.js';
import { el, set, show, write } from './dom.js';
import { clock, span } from './format.js';
import { pages } from './pages/all.js';
import { askNow, reach } from './poll.js';
import { signInForm } from './sign_in.js';

const byId = id => document.getElementById(id);
let open = null; // the open page as { page, view }

// ---- pages ------------------------------------------------------------------------------------------------------

/** Return the page that the address names, else the first one, and its parameters: #/waiting?key=order-17. */
function address() {
  const [path, query = ''] = location.hash.replace(/^#\/?/, '').split('?');
  return { page: pages.find(page => page.id === path) ?? pages[0], parameters: new URLSearchParams(query) };
}

/** Open the page that the address names. A page that is open gets the new parameters, if it has a `follow`. */
function follow() {
  const { page, parameters } = address();
  if (open?.page === page && open.view.follow) {
    open.view.follow(parameters);
    return;
  }
  const isFirst = open === null;
  enter(page, () => page.open(byId('page'), parameters));
  // Screen readers and the keyboard continue at the title.
  if (!isFirst) byId('title').focus();
}

/** Close the open page, and show another one. `makeView` fills the element of the page. */
function enter(page, makeView) {
  closeDialog();
  open?.view.close();
  byId('page').replaceChildren();
  write(byId('title'), page.title);
  document.title = `${page.title} – Timeball`;
  for (const link of byId('pages').querySelectorAll('a')) {
    set(link, 'aria-current', link.dataset.page === page.id && 'page');
  }
  set(document.body, 'data-page', page.id);
  closeMenu();
  open = { page, view: makeView() };
  scrollTo(0, 0);
}

/** Fill the menu, install the listeners, and open the first page. */
function begin() {
  byId('pages').append(...pages.map(page => el('li', { hidden: Boolean(page.isShown) },
    el('a', { href: `#/${page.id}`, 'data-page': page.id }, page.title))));
  addEventListener('hashchange', follow);
  byId('skip').addEventListener('click', event => {
    event.preventDefault();
    byId('main').focus();
  });
  byId('menu').addEventListener('click', () => {
    const isOpen = document.body.classList.toggle('menu-open');
    set(byId('menu'), 'aria-expanded', isOpen ? 'true' : 'false');
  });
  showAccount();
  watchBroker();
  follow();
}

function closeMenu() {
  document.body.classList.remove('menu-open');
  set(byId('menu'), 'aria-expanded', 'false');
}

// ---- the account ------------------------------------------------------------------------------------------------

function showAccount() {
  show(byId('account'), account() !== '');
  write(byId('account-name'), accountName());
}

document.addEventListener('timeball-unauthorized', event => {
  if (open?.page.id === 'sign-in') return;
  const wasRefused = account() !== '';
  signOut();
  askForAccount(wasRefused ? event.detail.message : '');
});

/** Show the form to sign in, with a reason if an account was refused. Then open the page that the address names. */
function askForAccount(reason) {
  leaveBroker();
  showAccount();
  enter({ id: 'sign-in', title: 'Sign in' }, () => signInForm(byId('page'), reason, () => {
    showAccount();
    open = { page: { id: '' }, view: { close() {} } };
    watchBroker();
    follow();
  }));
}

byId('sign-out').addEventListener('click', () => {
  signOut();
  askForAccount('');
});

// ---- whether the broker answers ---------------------------------------------------------------------------------

/** Show whether the broker answers, and the time of the last answer or of the next attempt. */
function showReach() {
  const isLost = reach.lostMs > 0;
  show(byId('reach'), isLost);
  set(byId('live'), 'data-state', isLost ? 'lost' : reach.reachedMs ? 'live' : 'connecting');
  if (isLost) {
    // This text does not change each second, because screen readers read each change aloud.
    write(byId('reach-text'), `Broker out of reach since ${clock(reach.lostMs)} (${reach.reason}). `
      + 'The figures below are those from before.');
    const leftMs = Math.max(0, reach.againMs - Date.now());
    write(byId('live-text'), leftMs >= 1_000 ? `next try in ${span(leftMs)}` : 'trying again');
  } else if (reach.reachedMs) {
    const isManual = broker.status?.clock === 'manual';
    write(byId('live-text'), `${isManual ? 'manual clock' : 'live'}, ${clock(reach.reachedMs + broker.aheadMs)}`);
  }
}

reach.addEventListener('change', showReach);
setInterval(() => !document.hidden && reach.lostMs && showReach(), 1_000);
byId('reach-now').addEventListener('click', askNow);

// Pages show buttons only to accounts that may use them.
broker.addEventListener('change', () => document.body.classList.toggle('may-admin', broker.mayAdmin));

// The menu hides a page that has no data for this broker.
broker.addEventListener('change', () => {
  for (const page of pages.filter(({ isShown }) => isShown)) {
    show(byId('pages').querySelector(`[data-page="${page.id}"]`).parentNode, page.isShown(broker.status));
  }
});

// ---- colours ----------------------------------------------------------------------------------------------------

const colours = byId('colours');
colours.querySelector(`[value="${document.documentElement.dataset.colours ?? 'auto'}"]`).checked = true;
colours.addEventListener('change', event => {
  const chosen = event.target.value;
  if (chosen === 'auto') delete document.documentElement.dataset.colours;
  else document.documentElement.dataset.colours = chosen;
  try {
    localStorage.setItem('timeball-colours', chosen);
  } catch {
    // The browser blocks the storage: the choice ends with this page.
  }
});

begin();
