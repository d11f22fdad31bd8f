(function(){
"use strict";
var root=document.documentElement,key="sm120-report-theme",button=document.getElementById("theme");
function dark(){var t=root.dataset.theme;return t?t==="dark":matchMedia("(prefers-color-scheme:dark)").matches}
function name(){button.textContent=dark()?"Light":"Dark"}
try{var kept=localStorage.getItem(key);if(kept)root.dataset.theme=kept}catch(e){}
button.hidden=false;name();
button.addEventListener("click",function(){var t=dark()?"light":"dark";root.dataset.theme=t;name();try{localStorage.setItem(key,t)}catch(e){}});
document.querySelectorAll("figure").forEach(function(figure){
var lines=figure.querySelectorAll("[data-series]");
if(lines.length<2)return;
figure.querySelectorAll(".legend li[data-for]").forEach(function(item){
var b=document.createElement("button");b.type="button";b.setAttribute("aria-pressed","true");
b.title="Show or hide this line";
while(item.firstChild)b.appendChild(item.firstChild);
item.appendChild(b);
b.addEventListener("click",function(){
var on=b.getAttribute("aria-pressed")!=="true";b.setAttribute("aria-pressed",String(on));
lines.forEach(function(l){if(l.dataset.series===item.dataset.for)l.classList.toggle("off",!on)});
});});});
})();
