//! The controller over real sockets, with scripted agents. One program: each further one would compile the controller's
//! server once more.

mod drains;
mod inventory;
mod migrations;
mod predictions;
mod restored;
mod scripted;
mod site;
