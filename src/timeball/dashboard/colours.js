'use strict';
// Runs before the first paint, so that no page flashes in the other colours. app.js has the switch.
(() => {
  let kept = null;
  try {
    kept = localStorage.getItem('timeball-colours');
  } catch {
    // Storage is blocked: the system's colours it is.
  }
  if (kept === 'light' || kept === 'dark') document.documentElement.dataset.colours = kept;
})();
