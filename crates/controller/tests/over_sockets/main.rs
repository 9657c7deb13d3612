//! The controller over real sockets, with scripted agents. One program: each further one would compile the controller's
//! server once more.

mod alarms;
mod audit;
mod bounds;
mod certificates;
mod clones;
mod console;
mod drains;
mod hostile;
mod inventory;
mod metrics;
mod migrations;
mod moves_ended;
mod placement;
mod predictions;
mod restored;
mod scripted;
mod site;
mod uids;
mod unread;
mod versions;
