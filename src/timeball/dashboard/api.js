// Requests to the HTTP API (docs/http.md). The dashboard makes no other requests.

const BASE = new URL('../', document.baseURI);
const ACCOUNT = 'timeball-account';
const ANSWER_MS = 20_000;

/** The error of an answer with a problem document: the broker has refused the request, and `message` is its reason. */
export class Problem extends Error {
  constructor(status, value) {
    super(value.detail || value.title || `status ${status}`);
    this.status = status;
    this.code = value.code || `status ${status}`;
    this.value = value;
  }

  /** Whether the same request may succeed later. */
  get isPassing() {
    return this.status === 429 || this.status >= 500;
  }
}

/** The error without an answer of a broker: it does not run, the connection is broken, or another server answers. */
export class OutOfReach extends Error {}

/**
 * Make a request and return the JSON value of its answer. `path` is a list of parts, each of which may be any text.
 *
 * Raises Problem for a refusal, OutOfReach, and the error of an abort by `signal`. An answer 401 is also an event
 * `timeball-unauthorized` of the document.
 */
export async function ask(method, path, { query = {}, body, signal } = {}) {
  const target = new URL(path.map(encodeURIComponent).join('/'), BASE);
  for (const [name, value] of Object.entries(query)) {
    if (value !== undefined && value !== null && value !== '') target.searchParams.set(name, value);
  }
  const headers = {};
  if (body !== undefined) headers['content-type'] = 'application/json';
  if (account()) headers.authorization = `Bearer ${account()}`;
  const limit = AbortSignal.timeout(ANSWER_MS);
  let answer;
  let value;
  try {
    answer = await fetch(target, {
      method,
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      cache: 'no-store',
      credentials: 'omit',
      redirect: 'error',
      signal: signal ? AbortSignal.any([signal, limit]) : limit,
    });
    value = JSON.parse((await answer.text()) || '{}');
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new OutOfReach(answer ? `an answer that is no JSON (status ${answer.status})` : 'no answer', { cause: error });
  }
  if (answer.ok) return value;
  const problem = new Problem(answer.status, value);
  if (answer.status === 401) document.dispatchEvent(new CustomEvent('timeball-unauthorized', { detail: problem }));
  throw problem;
}

export const get = (path, query, signal) => ask('GET', path, { query, signal });

/** Return all rows of a list that is read in pages. `name` is the key of the rows in an answer. Raises as `ask`. */
export async function getAll(path, name, signal) {
  const rows = [];
  for (let page = null, isFirst = true; isFirst || page; isFirst = false) {
    const answer = await get(path, { page }, signal);
    rows.push(...answer[name]);
    page = answer.next_page;
  }
  return rows;
}

// ---- the account ------------------------------------------------------------------------------------------------
// It is in sessionStorage, which ends with the tab, and which no page of another site can read.

export const account = () => sessionStorage.getItem(ACCOUNT) ?? '';
export const accountName = () => account().split(':')[0];
export const signIn = (accessKey, secretKey) => sessionStorage.setItem(ACCOUNT, `${accessKey}:${secretKey}`);
export const signOut = () => sessionStorage.removeItem(ACCOUNT);
