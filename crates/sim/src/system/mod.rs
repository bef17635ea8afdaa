//! Memory management systems, each behind the trait [`Manager`]. A system is a file here and a line of [`build`].

mod agent;
mod alto;
mod arms;
mod block_counters;
mod colloid;
mod colloid_tpp;
#[cfg(test)]
mod conformance;
mod counting_bloom;
mod damon;
mod hemem;
mod heteroos;
mod hint_fault_tiering;
mod host_hint_fault_tiering;
mod hybridtier;
mod linux_damon_auto;
mod linux_interleave;
mod linux_pghot;
mod manager;
mod memstrata;
mod memtis;
mod nimble;
mod nomad;
mod pact;
mod paper_ranges;
mod promotion;
mod raminate;
mod reclaimer;
mod scan;
mod sequential;
mod unmanaged;
mod vtmm;
mod xen_history;

use demeter_scenario::System;

pub(crate) use agent::{AgentSettings, SimulatedAgent};
pub(crate) use alto::Alto;
pub(crate) use arms::Arms;
pub(crate) use colloid::Colloid;
pub(crate) use colloid_tpp::ColloidTpp;
pub(crate) use damon::Damon;
pub(crate) use hemem::Hemem;
pub(crate) use heteroos::HeteroOs;
pub(crate) use hint_fault_tiering::HintFaultTiering;
pub(crate) use host_hint_fault_tiering::{Ageing, HostHintFaultTiering};
pub(crate) use hybridtier::HybridTier;
pub(crate) use linux_damon_auto::DamonAuto;
pub(crate) use linux_interleave::Interleaving;
pub(crate) use linux_pghot::Pghot;
pub(crate) use manager::{Context, Managed, Manager, NEVER_PS, Needs, Tiering};
pub(crate) use memstrata::{HardwareAlone, Memstrata};
pub(crate) use memtis::Memtis;
pub(crate) use nimble::Nimble;
pub(crate) use nomad::Nomad;
pub(crate) use pact::Pact;
pub(crate) use paper_ranges::Split;
pub(crate) use raminate::Raminate;
pub(crate) use unmanaged::Unmanaged;
pub(crate) use vtmm::Vtmm;
pub(crate) use xen_history::XenHistory;

/// Creates the manager of a VM.
pub(crate) type Build = fn(&Managed<'_>) -> Box<dyn Manager>;

/// The constructor of a system's managers.
pub(crate) fn build(system: System) -> Build {
    match system {
        System::None => |_| Box::new(Unmanaged::first_touch()),
        System::Oracle => |_| Box::new(Unmanaged::hot_set_first()),
        System::Linux => |managed| Box::new(HintFaultTiering::linux(managed)),
        System::Damon => |managed| Box::new(Damon::new(managed)),
        System::LinuxDamonAuto => |managed| Box::new(DamonAuto::new(managed)),
        System::LinuxPghot => |managed| Box::new(Pghot::on_hint_faults(managed)),
        System::LinuxPghotIbs => |managed| Box::new(Pghot::on_samples(managed)),
        System::LinuxInterleave => |managed| Box::new(Interleaving::new(managed)),
        System::HLinux => |managed| Box::new(HostHintFaultTiering::linux(managed)),
        // `run_jobs` refuses systems that the simulator does not have.
        System::GLinux | System::HDamon | System::HHistory => {
            |_| Box::new(Unmanaged::first_touch())
        }
        System::GTpp => |managed| Box::new(HintFaultTiering::tpp(managed)),
        System::HTpp => |managed| Box::new(HostHintFaultTiering::tpp(managed, Ageing::Flushes)),
        System::HTpp613 => |managed| Box::new(HostHintFaultTiering::tpp(managed, Ageing::Locks)),
        System::HTpp615 => |managed| Box::new(HostHintFaultTiering::tpp(managed, Ageing::Lockless)),
        System::Memtis => {
            |managed| Box::new(Memtis::new(managed.load_ps, !managed.memtis_unlimited))
        }
        System::Nomad => |managed| Box::new(Nomad::new(managed)),
        System::Hemem => |managed| Box::new(Hemem::new(managed)),
        System::Colloid => |managed| Box::new(Colloid::new(managed)),
        System::ColloidTpp => |managed| Box::new(ColloidTpp::new(managed)),
        System::HybridTier => |managed| Box::new(HybridTier::new(managed)),
        System::Arms => |managed| Box::new(Arms::new(managed)),
        System::AltoLinux => |managed| Box::new(Alto::on_linux(managed)),
        System::AltoTpp => |managed| Box::new(Alto::on_tpp(managed)),
        System::Pact => |managed| Box::new(Pact::new(managed)),
        System::Nimble => |_| Box::new(Nimble),
        System::XenHistory => |_| Box::new(XenHistory::default()),
        System::Raminate => |_| Box::new(Raminate::default()),
        System::Vtmm => |_| Box::new(Vtmm::default()),
        System::HeteroOs => |_| Box::new(HeteroOs::default()),
        System::FlatMode => |_| Box::new(HardwareAlone),
        System::Memstrata => |_| Box::new(Memstrata::default()),
        System::Demeter => |managed| Box::new(SimulatedAgent::product(managed.agent)),
        System::DemeterDamon => |managed| Box::new(SimulatedAgent::on_damon(managed.agent)),
        System::DemeterWorker => |managed| Box::new(SimulatedAgent::polling(managed.agent)),
        System::DemeterBlocks => |managed| Box::new(SimulatedAgent::blocks(managed.agent)),
        System::DemeterSequential => |managed| Box::new(SimulatedAgent::sequential(managed.agent)),
        System::DemeterPaper => |managed| Box::new(SimulatedAgent::paper(managed.agent)),
    }
}
