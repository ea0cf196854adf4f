'use strict';
// Sets the chosen colours before the first paint, so that no page flashes in the others. app.js has the switch.
(() => {
  let chosen = null;
  try {
    chosen = localStorage.getItem('timeball-colours');
  } catch {
    // The browser blocks the storage: the page has the colours of the system.
  }
  if (chosen === 'light' || chosen === 'dark') document.documentElement.dataset.colours = chosen;
})();
