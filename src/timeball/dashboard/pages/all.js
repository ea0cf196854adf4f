// The pages, in the order of the menu.

import { bulk } from './bulk.js';
import { campaigns } from './campaigns.js';
import { cluster } from './cluster.js';
import { coming } from './coming.js';
import { deadLetters } from './dead_letters.js';
import { groups } from './groups.js';
import { node } from './node.js';
import { pipeline } from './pipeline.js';
import { punctual } from './punctual.js';
import { push } from './push.js';
import { schedules } from './schedules.js';
import { waitingPage } from './waiting.js';

export const pages = [punctual, coming, waitingPage, schedules, bulk, groups, deadLetters, push, campaigns, pipeline, cluster, node];
