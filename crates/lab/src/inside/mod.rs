//! What runs beside the workload: a lab VM's init process, and the parts that watch a system at work,
//! in a VM and on this machine (`testbed`).

mod agent;
mod control_page;
mod counters;
mod delay;
mod fault;
mod init;
pub(crate) mod job;
pub(crate) mod kernel;
mod layout;
mod loopback;
mod modules;
mod nested;
mod observer;
mod plugged;
pub(crate) mod rivals;
mod rounds;
pub(crate) mod testbed;
mod ticker;
pub(crate) mod workload;
pub(crate) mod zones;

pub(crate) use fault::Fault;
pub use init::init;
