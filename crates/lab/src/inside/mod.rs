//! The measuring side: a lab VM's init process, and the observers of a system under test. `testbed` also runs them on
//! this machine.

mod agent;
mod control_page;
mod counters;
mod delay;
mod host_link;
mod init;
pub(crate) mod job;
pub(crate) mod kernel;
mod layout;
mod loopback;
mod modules;
mod nested;
mod observer;
mod own_program;
mod placement;
mod plugged;
pub(crate) mod rivals;
mod rounds;
pub(crate) mod testbed;
mod ticker;
pub(crate) mod workload;
pub(crate) mod zones;

pub use init::init;
