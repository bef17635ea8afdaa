//! Follows nodes, processes, their mappings and their shares.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::time::Instant;

use demeter_policy::Pid;
use demeter_policy::engine::{Input, Misuse};

use super::machine::Change;
use super::process::Process;
use super::{Agent, AgentError};
use crate::targets::{Target, TargetsError};

impl Agent {
    /// Checks which nodes and CPUs came or went.
    pub(super) fn follow_nodes(&mut self) -> Result<(), AgentError> {
        self.followed = Instant::now();
        match self.machine.follow(&self.config) {
            Ok(Change::None) => return Ok(()),
            Ok(Change::Amounts) => {}
            Ok(Change::Nodes) => {
                tracing::info!("the nodes by tier are {} now", self.machine.tiers());
                self.prober = self.machine.prober();
                self.mover = self.machine.mover();
                self.rules.managed = self.machine.tiers().nodes().collect();
            }
            Ok(Change::Tiers) => return Err(AgentError::OtherTiers),
            // The remaining nodes make no tiers: the former tiers stay, and a removed node has no free memory.
            Err(error) => {
                self.error = Some(error.to_string());
                return Ok(());
            }
        }
        let (tiers, nodes_left_alone) = self.machine.describe();
        self.status.update(|s| {
            s.tiers = tiers;
            s.nodes_left_alone = nodes_left_alone;
        });
        let (sizes, cpus) = (self.machine.sizes(), self.machine.cpus());
        Ok(self.engine.push(Input::Machine { sizes, cpus })?)
    }

    /// Lists processes and reads their mappings.
    pub(super) fn refresh(&mut self) -> Result<(), AgentError> {
        let targets = match self.finder.find() {
            // Without a new list the engine keeps the old one.
            Err(error @ TargetsError::Read { .. }) => {
                self.error = Some(error.to_string());
                return Ok(self.engine.push(Input::Refreshed)?);
            }
            found => found?,
        };
        let same = |p: &Process, t: &Target| p.target.start_ticks == t.start_ticks;
        let is_target = |pid: Pid, p: &Process| targets.iter().any(|t| t.pid == pid && same(p, t));
        let has_gone = |(&pid, p): (&Pid, &Process)| (!is_target(pid, p)).then_some(pid);
        let gone: Vec<Pid> = self.processes.iter().filter_map(has_gone).collect();
        for &pid in &gone {
            self.processes.remove(&pid);
            self.mover.forget(pid);
            self.engine.push(Input::Ended(pid))?;
        }
        let mut changed = !gone.is_empty();
        for target in targets {
            let pid = target.pid;
            if let Entry::Vacant(vacant) = self.processes.entry(pid) {
                tracing::info!("looking after {pid} ({})", target.comm);
                vacant.insert(Process::new(target));
                self.engine.push(Input::Started(pid))?;
                changed = true;
            }
        }
        self.share()?;
        for (&pid, process) in &mut self.processes {
            if self.machine.has_choice() {
                process.look_where_it_runs(&self.root, |cpu| self.machine.node_of_cpu(cpu));
                let socket = process.near().map(|node| self.machine.socket_of(node));
                let socket = socket.unwrap_or_default();
                if process.socket != socket {
                    self.engine.push(Input::Near { pid, socket })?;
                    process.socket = socket;
                }
            }
        }
        self.budget.begin(self.clock.now());
        let pids: Vec<Pid> = self.processes.keys().copied().collect();
        for pid in pids {
            self.read_space(pid);
        }
        self.divide()?;
        if changed {
            let pids: Vec<Pid> = self.processes.keys().copied().collect();
            self.tracker.set_targets(&pids)?;
        }
        Ok(self.engine.push(Input::Refreshed)?)
    }

    /// Reads a process's mappings, and which of them are left alone.
    pub(super) fn read_space(&mut self, pid: Pid) {
        let Some(process) = self.processes.get_mut(&pid) else {
            return;
        };
        let reasons = |process: &Process| Vec::from_iter(process.left_alone.keys().copied());
        let before = reasons(process);
        let read = process.read_space(&self.root, &self.rules, &mut self.budget, &self.clock);
        if let Err(error) = read {
            self.error = Some(error.to_string());
        }
        for (hold, bytes) in &process.left_alone {
            if !before.contains(hold) && !hold.is_passing() {
                let (name, why) = (process.name(), hold.why());
                tracing::info!("leaving alone {bytes} of {name} {why}");
            }
        }
    }

    /// Gives the engine each process's movable memory.
    pub(super) fn divide(&mut self) -> Result<(), Misuse> {
        let mapped = self.processes.iter().map(|(&pid, p)| (pid, p.mapped()));
        let spaces = self.sharing.divide(&mapped.collect());
        for (pid, vmas) in &spaces {
            self.engine.push(Input::Space { pid: *pid, vmas })?;
        }
        Ok(())
    }

    /// Gives the engine each process's share of fast memory.
    fn share(&mut self) -> Result<(), AgentError> {
        let mut shares = BTreeMap::new();
        // The first matching cgroup takes precedence, so it is inserted last.
        for (path, share) in self.config.shares().into_iter().rev() {
            match self.finder.in_cgroup(path) {
                Ok(pids) => shares.extend(pids.into_iter().map(|pid| (Pid(pid), share))),
                Err(error) => {
                    // Shares stay as they are.
                    self.error = Some(error.to_string());
                    return Ok(());
                }
            }
        }
        for (&pid, process) in &mut self.processes {
            let share = shares.get(&pid).copied();
            if process.share != share {
                self.engine.push(Input::Share { pid, share })?;
                process.share = share;
            }
        }
        Ok(())
    }

    /// Notes that a process ended before a refresh saw it.
    pub(super) fn end(&mut self, pid: Pid) -> Result<(), AgentError> {
        self.processes.remove(&pid);
        self.mover.forget(pid);
        self.engine.push(Input::Ended(pid))?;
        let pids: Vec<Pid> = self.processes.keys().copied().collect();
        Ok(self.tracker.set_targets(&pids)?)
    }
}
